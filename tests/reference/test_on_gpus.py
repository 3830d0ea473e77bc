"""What a cast does otherwise where it is lowered for a GPU: the same bits, in fewer passes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mx_jax import formats
from mx_jax.codecs import scale as scale_codec
from mx_jax.reference import quantize as reference
from mx_jax.specs import operand
from tests.quick import lowered, quick


def as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written for GPUs runs here."""

    def chosen(*operands: Any, cuda: Callable[..., Any] | None = None, **others: Any) -> Any:
        return (cuda or others["default"])(*operands)

    monkeypatch.setattr(lax, "platform_dependent", chosen)


def random_bits(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    bits = np.random.default_rng(seed).integers(0, 256, (*shape, np.dtype(dtype).itemsize), "u1")
    return bits.view(dtype)[..., 0]


def test_reciprocals_of_every_scale(monkeypatch: pytest.MonkeyPatch):
    """Looked up by code, on GPUs, and divided: also where the scale is NaN or zero."""
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)

    def reciprocals(tensor_scale: jax.Array) -> jax.Array:
        return scale_codec._reciprocal(jnp.asarray(codes), tensor_scale, formats.NVFP4.scale)

    scales = [jnp.full((1, 1), scale, jnp.float32) for scale in (1.0, 0.0123, 2.0**-64, 3e38)]
    wanted = list(map(jax.jit(reciprocals), scales))
    as_on_gpus(monkeypatch)
    looked_up = jax.jit(lambda scale: reciprocals(scale))
    assert "gather" in looked_up.trace(scales[0]).lower().as_text()
    for scale, values in zip(scales, wanted, strict=True):
        result = looked_up(scale)
        assert result.shape == codes.shape
        assert np.array_equal(np.isnan(result), np.isnan(values)) and np.isnan(result).any()
        assert np.array_equal(np.nan_to_num(result, nan=0), np.nan_to_num(values, nan=0))


@pytest.mark.parametrize(
    ("name", "axis", "size"),
    [("mxfp8_e4m3", -2, 40), ("nvfp4", -1, 16), ("mxfp8_e4m3", -2, formats.WHOLE)],
)
def test_casts_give_the_same_bits(name: str, axis: int, size: Any, monkeypatch: pytest.MonkeyPatch):
    """By halves, the last block partial, and of a whole axis by parts; all kinds of numbers."""
    x, spec = random_bits((96, 104), jnp.bfloat16), operand(name)
    x = np.where(np.abs(x.astype("f4")) < 1e30, x, x.dtype.type(1))

    def cast(x: jax.Array) -> tuple[Any, ...]:
        q = reference.quantize(x, spec.format, ((axis, size),), spec.scale_rule)
        return q.codes, q.scales

    wanted = quick(cast)(x)
    as_on_gpus(monkeypatch)
    result = quick(lambda x: cast(x))(x)
    for one, other in zip(result, wanted, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize(
    ("blocks", "reductions", "halved"),
    [
        (((-1, 32),), 0, True),
        (((-1, formats.WHOLE),), 1, True),
        (((-2, formats.WHOLE),), 1, False),
        (((-1, 128),), 1, False),
    ],
)
def test_short_blocks_are_not_reduced(blocks: Any, reductions: int, halved: bool):
    """Lowered for a GPU, of a whole axis parts of it; on a CPU nothing changes."""
    spec = operand("mxfp8_e4m3")

    def cast(x: jax.Array) -> jax.Array:
        return reference.quantize(x, spec.format, blocks, spec.scale_rule).codes

    x = jax.ShapeDtypeStruct((4, 256), jnp.bfloat16)
    for platform, number, slices in (("cuda", reductions, halved), ("cpu", 1, False)):
        text = lowered(cast, x, platform=platform)
        assert text.count("stablehlo.reduce(") == number
        assert ("stablehlo.slice" in text) == slices
