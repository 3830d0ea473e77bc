"""What a tensor looks like, and what is out of the ordinary."""

import dataclasses
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import checkpoint, formats
from mx_jax.formats import MXFP4, NVFP4
from tests.checkpoint.stored import draw


def ordinary(rng: np.random.Generator) -> mx_jax.MXArray:
    """Codes of all kinds under scales from 2^-7 to 2^-4."""
    x = draw(MXFP4, (8, 64), rng)
    return dataclasses.replace(x, scales=jnp.asarray(rng.integers(120, 124, (8, 2)), jnp.uint8))


def test_numbers(rng: np.random.Generator):
    x = ordinary(rng)
    result = checkpoint.plausibility(x)
    values = np.asarray(x.dequantize(jnp.float32), np.float64)
    assert result == checkpoint.Plausibility(
        amax=np.abs(values).max(),
        zeros=(values == 0).mean(),
        saturated=float((np.asarray(x.codes) % 8 == 7).mean()),
        not_finite=0,
        octaves=3.0,
        warnings=(),
    )
    # Blocks along the first axis, two axes, under a divisor: the same numbers as decoding gives.
    for y in (
        draw(NVFP4, (48, 3), rng, axis=-2),
        draw(formats.MXFP4_2D, (33, 65), rng),
        draw(formats.FLOAT8_ROWWISE_E4M3, (3, 50), rng),
    ):
        y = dataclasses.replace(y, codes=y.codes & 0x3F, scales=y.scales % 16 + 1)
        amax = np.abs(np.asarray(y.dequantize(jnp.float32))).max()
        assert np.float32(checkpoint.plausibility(y).amax) == amax


def test_plain_arrays():
    result = checkpoint.plausibility(jnp.array([0, -2, np.nan, np.inf], jnp.bfloat16))
    assert (result.amax, result.zeros, result.not_finite) == (2, 0.25, 2)
    assert result.warnings == ("2 of 4 values are NaN or infinite",)
    assert checkpoint.plausibility(np.zeros((0, 3))).warnings == ()
    assert checkpoint.plausibility(np.arange(5)).amax == 4


@pytest.mark.parametrize(
    ("changed", "warnings"),
    [
        ({"codes": lambda x: x.codes * 0}, ["all values are zero"]),
        ({"codes": lambda x: x.codes.at[:, 2:].set(8)}, [r"9\d\.\d% of the values are zero"]),
        ({"codes": lambda x: x.codes | 7}, [r"100\.0% of the codes have the largest magnitude"]),
        ({"scales": lambda x: x.scales + 20}, ["largest value is .*way around, or twice"]),
        ({"scales": lambda x: x.scales - 40}, ["largest value is .*e-1"]),
        ({"scales": lambda x: x.scales.at[0, 0].set(70)}, [r"the scales span 5\d octaves"]),
        (
            {"scales": lambda x: x.scales.at[0, 0].set(255)},
            ["32 of 512 values are NaN", "1 of 16 scales are NaN, infinite or negative"],
        ),
    ],
)
def test_out_of_the_ordinary(changed: Any, warnings: list[str], rng: np.random.Generator):
    x = ordinary(rng)
    result = checkpoint.plausibility(
        dataclasses.replace(x, **{part: change(x) for part, change in changed.items()})
    ).warnings
    assert len(result) == len(warnings)
    for one, expected in zip(result, warnings, strict=True):
        assert re.search(expected, one), one


def test_one_scale_for_all(rng: np.random.Generator):
    x = draw(MXFP4, (64, 32), rng)
    same = dataclasses.replace(x, scales=jnp.full((64, 1), 120, jnp.uint8))
    assert checkpoint.plausibility(same).warnings == ("all 64 scales are equal",)
    fewer = mx_jax.quantize(jnp.ones((2, 32)), "mxfp4")
    assert checkpoint.plausibility(fewer).warnings == ()


def test_a_tensor_scale_the_other_way_around(rng: np.random.Generator):
    """What compressed-tensors stores, 2688 / amax, taken for a factor."""
    x = dataclasses.replace(draw(NVFP4, (8, 64), rng), scales=jnp.full((8, 4), 0x70, jnp.uint8))
    right = dataclasses.replace(x, tensor_scale=jnp.full((1, 1), 0.5 / 2688))
    wrong = dataclasses.replace(x, tensor_scale=jnp.full((1, 1), 2688 / 0.5))
    assert not checkpoint.plausibility(right).warnings
    assert "the other way around" in checkpoint.plausibility(wrong).warnings[0]


def test_scales_of_blocks_of_zeros_say_nothing():
    """FLOOR gives them its smallest one, 2^-127."""
    w = np.ones((4, 64), np.float32)
    w[2, 32:] = 0
    result = checkpoint.plausibility(mx_jax.quantize(w, "mxfp4"))
    assert result.octaves == 0 and result.warnings == ()
