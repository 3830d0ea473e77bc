"""Configurations of `quantize` and hypothesis strategies for what goes in.

The configurations are few and fixed, since each compiles one program; hypothesis draws values.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hypothesis import strategies as st

import mx_jax
from mx_jax.formats import (
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    MXINT8,
    BlockFormat,
)


@dataclasses.dataclass(frozen=True)
class Config:
    """One way to call `quantize`."""

    format: BlockFormat
    scale_rule: str
    shape: tuple[int, ...]
    axis: int
    block_size: int
    rounding: str = "nearest"
    dtype: str = "float32"

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return (
            f"{self.format.name}-{self.scale_rule}-{self.rounding}-{shape}"
            f"-axis{self.axis}-block{self.block_size}-{self.dtype}"
        )

    @property
    def options(self) -> dict:
        """Keyword arguments of `mx_jax.quantize` and of the oracle."""
        return {
            "axis": self.axis,
            "block_size": self.block_size,
            "scale_rule": self.scale_rule,
            "rounding": self.rounding,
        }


# Ranks 1 to 4, first, middle and last axes, whole, partial and single blocks, blocks of one and
# blocks longer than the axis; every format, rule, deterministic rounding and dtype.
CONFIGS = (
    Config(MXFP8_E4M3, "floor", (40,), -1, 32),
    Config(MXFP8_E4M3, "rceil", (3, 40), 1, 32),
    Config(MXFP8_E4M3, "even", (40, 3), 0, 16, "away"),
    Config(MXFP8_E5M2, "floor", (2, 40, 3), 1, 32),
    Config(MXFP8_E5M2, "rceil", (3, 40), -1, 8, "toward_zero"),
    Config(MXFP8_E5M2, "ceil", (2, 2, 17), -1, 7, dtype="bfloat16"),
    Config(MXFP6_E2M3, "even", (3, 40), -1, 32),
    Config(MXFP6_E2M3, "ceil", (40, 3), -2, 40, "away"),
    Config(MXFP6_E3M2, "floor", (2, 3, 2, 9), 3, 4),
    Config(MXFP6_E3M2, "rceil", (3, 40), -1, 16, dtype="float16"),
    Config(MXFP4, "floor", (3, 40), -1, 32, dtype="bfloat16"),
    Config(MXFP4, "even", (2, 40, 3), -2, 16),
    Config(MXFP4, "rceil", (40,), 0, 64, "toward_zero"),
    Config(MXFP4, "ceil", (9, 2), 0, 1),
    Config(MXINT8, "floor", (3, 40), -1, 32),
    Config(MXINT8, "rceil", (2, 2, 3, 7), -3, 2, "away"),
    Config(MXINT8, "even", (40, 3), 0, 32, dtype="float16"),
    Config(MXINT8, "ceil", (3, 40), -1, 16, "toward_zero", dtype="bfloat16"),
)

SPECIALS = (
    np.nan,
    np.inf,
    -np.inf,
    0.0,
    -0.0,
    2.0**-149,
    -(2.0**-149),
    2.0**-127,
    2.0**-126,
    -(2.0**-130),
    2.0**127,
    float(np.finfo(np.float32).max),
    -65504.0,
    2.0**-24,
    6.0,
    7.0,
    448.0,
    -480.0,
    1.9921875,
)
FINITE_SPECIALS = tuple(x for x in SPECIALS if np.isfinite(x))


@st.composite
def tensors(draw: st.DrawFn, shape: tuple[int, ...], dtype: str, finite: bool = False):
    """Values around one power of two, wherever it is in float32's range, with a few specials."""
    size = int(np.prod(shape))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    center = draw(st.integers(-149, 126))
    octaves = draw(st.integers(0, 24))
    exponents = np.clip(center - rng.integers(0, octaves + 1, size), -149, 126)
    values = np.ldexp(rng.uniform(-2, 2, size), exponents)
    specials = st.sampled_from(FINITE_SPECIALS if finite else SPECIALS)
    for index, special in draw(st.lists(st.tuples(st.integers(0, size - 1), specials), max_size=5)):
        values[index] = special
    narrow = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    if finite:
        limit = float(ml_dtypes.finfo(narrow).max)
        values = np.where(np.abs(values) > limit, np.copysign(limit, values), values)
    with np.errstate(over="ignore"):
        return values.astype(np.float32).astype(narrow).reshape(shape)


Outputs = tuple[np.ndarray, np.ndarray, np.ndarray]


@functools.cache
def compiled(config: Config) -> Callable[[np.ndarray], Outputs]:
    """`quantize` and `dequantize` to float32: codes, scales and values."""

    @jax.jit
    def run(x: jax.Array):
        quantized = mx_jax.quantize(x, config.format, **config.options)
        return quantized.codes, quantized.scales, quantized.dequantize(jnp.float32)

    def call(x: np.ndarray) -> Outputs:
        codes, scales, values = run(x)
        return np.asarray(codes), np.asarray(scales), np.asarray(values)

    return call
