"""How GGUF stores a tensor's values: one row for each type that is read.

Blocks lie along the last axis. Where a byte holds two codes, the low nibbles of a group are its
first half and the high ones its second. Source: ggml's block structures, the GGUF description.
"""

import dataclasses
from collections.abc import Callable

import ml_dtypes
import numpy as np

from mx_jax.formats import MXFP4, NVFP4, BlockFormat


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufType:
    """One of ggml's types.

    Attributes:
      number: in the file.
      name: ggml's.
      nbytes: of a block.
      decode: from blocks, uint8 `[n, nbytes]`, to their values, or to codes and scales, both uint8,
        as `format` has them; one row a block.
      block: elements of a block.
      format: of the MXArrays that hold it; None if none does.
      quantized: whether its values are not stored as they are.
    """

    number: int
    name: str
    nbytes: int
    decode: Callable[[np.ndarray], tuple[np.ndarray, ...]]
    block: int = 1
    format: BlockFormat | None = None
    quantized: bool = True


def _plain(number: int, name: str, dtype: type) -> GgufType:
    found = np.dtype(dtype)
    return GgufType(
        number=number,
        name=name,
        nbytes=found.itemsize,
        decode=lambda blocks: (blocks.view(found),),
        quantized=False,
    )


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Codes of groups in order: their low nibbles, then their high ones."""
    return np.concatenate([packed & 0xF, packed >> 4], axis=-1)


def _halves(blocks: np.ndarray) -> np.ndarray:
    """float16 numbers as float32."""
    return np.ascontiguousarray(blocks).view(np.float16).astype(np.float32)


def _mxfp4(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """E8M0, then 16 bytes. ggml's table has doubled values under a halved scale: E2M1's."""
    return _nibbles(blocks[:, 1:]), blocks[:, :1]


def _nvfp4(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Four E4M3 scales, then 8 bytes for each of their 16 elements; doubled and halved likewise."""
    return _nibbles(blocks[:, 4:].reshape(-1, 4, 8)), blocks[:, :4]


def _q4_0(blocks: np.ndarray) -> tuple[np.ndarray]:
    """A float16 scale, and codes from -8 to 7 that are stored from 0 on."""
    return (_halves(blocks[:, :2]) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8),)


def _q4_1(blocks: np.ndarray) -> tuple[np.ndarray]:
    """A float16 scale, a float16 minimum, and codes from 0 to 15."""
    return (_halves(blocks[:, :2]) * _nibbles(blocks[:, 4:]) + _halves(blocks[:, 2:4]),)


def _q8_0(blocks: np.ndarray) -> tuple[np.ndarray]:
    """A float16 scale and signed bytes."""
    return (_halves(blocks[:, :2]) * blocks[:, 2:].view(np.int8),)


GGUF_TYPES: tuple[GgufType, ...] = (
    _plain(0, "F32", np.float32),
    _plain(1, "F16", np.float16),
    GgufType(number=2, name="Q4_0", block=32, nbytes=18, decode=_q4_0),
    GgufType(number=3, name="Q4_1", block=32, nbytes=20, decode=_q4_1),
    GgufType(number=8, name="Q8_0", block=32, nbytes=34, decode=_q8_0),
    _plain(24, "I8", np.int8),
    _plain(25, "I16", np.int16),
    _plain(26, "I32", np.int32),
    _plain(27, "I64", np.int64),
    _plain(28, "F64", np.float64),
    _plain(30, "BF16", ml_dtypes.bfloat16),
    GgufType(number=39, name="MXFP4", block=32, nbytes=17, format=MXFP4, decode=_mxfp4),
    GgufType(number=40, name="NVFP4", block=64, nbytes=36, format=NVFP4, decode=_nvfp4),
)
# What others know by these numbers, for messages.
UNREAD = {
    6: "Q5_0",
    7: "Q5_1",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    41: "Q1_0",
}
