"""What a layout is: the tensors that others store a quantized weight as, and how to know them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mx_jax.codecs.blocks import Blocks
from mx_jax.formats import BlockFormat, Whole

# What a header says of a tensor: safetensors' name of its dtype, and its shape.
Facts = tuple[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The tensors that a quantized weight is stored as.

    A weight called `<base><weight>` is the tensors `<base><codes>`, `<base><scales>` and, if there
    is one, `<base><tensor_scale>`. Blocks lie along its last axis, the one that is contracted:
    these are weights `[out, in]`.

    Attributes:
      name: what users and messages call it.
      format: of the weight.
      codes: suffix of the codes' name; FP4 lies two in a byte, the first in the low nibble, FP6
        four in three bytes.
      scales: suffix of the block scales' name.
      tensor_scale: of the tensor scale's name, or None.
      weight: of the weight's name.
      codes_dtype: safetensors' name of the codes' dtype.
      scales_dtypes: those that the scales may have.
      divides: whether the tensor scale is stored as what it divides by.
      scale_shape: of the tensor scale as it is written; any of one number is read.
      rotation: suffix of the matrix by which inputs have to be rotated, in groups along their last
        axis, before they meet such a weight; None for weights as they were trained.
      padded: whether the scales may be padded to whole tiles of 128 x 4, rows in order.
      exponents: whether E8M0 scales and the tensor scale are stored that make float32 scales
        together, `2^(scale - 127)` times the tensor's.
      split: whether the codes' last axis is cut into blocks `[..., in / 32, 16]`.
      configs: what `quantization_config` says where the layout is used: pairs of key and value.

    Examples:
      >>> from mx_jax.checkpoint import LAYOUTS
      >>> layout = next(row for row in LAYOUTS if row.name == "nvfp4-pack-quantized")
      >>> layout.codes, layout.scales, layout.tensor_scale, layout.divides
      ('.weight_packed', '.weight_scale', '.weight_global_scale', True)
    """

    name: str
    format: BlockFormat
    codes: str
    scales: str
    tensor_scale: str | None = None
    weight: str = ".weight"
    codes_dtype: str = "U8"
    scales_dtypes: tuple[str, ...] = ("U8",)
    divides: bool = False
    scale_shape: tuple[int, ...] = (1,)
    rotation: str | None = None
    padded: bool = False
    exponents: bool = False
    split: bool = False
    configs: tuple[tuple[tuple[str, str], ...], ...] = ()

    @property
    def blocks(self) -> Blocks:
        """Those of a weight, the last two axes being `[out, in]`."""
        sizes = zip((-2, -1), self.format.block, strict=True)
        return tuple((axis, size) for axis, size in sizes if size != 1)

    def parts(self, base: str) -> dict[str, str]:
        """Names of a weight's tensors."""
        found = {"codes": base + self.codes, "scales": base + self.scales}
        if self.tensor_scale is not None:
            found["tensor_scale"] = base + self.tensor_scale
        return found

    def shape(self, codes: tuple[int, ...]) -> tuple[int, ...]:
        """The weight's shape, from that of its stored codes."""
        if self.split:
            codes = (*codes[:-2], codes[-2] * codes[-1])
        return (*codes[:-1], codes[-1] * 8 // self.format.element.bits)

    def scales_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """What the scales of a weight of that shape have to be."""
        *front, rows, columns = shape
        counts = (
            1 if isinstance(size, Whole) else -(-length // size)
            for size, length in zip(self.format.block, (rows, columns), strict=True)
        )
        return (*front, *counts)

    @property
    def least_axes(self) -> int:
        """Axes that stored codes have at least."""
        return 3 if self.split else 2

    def accepts(self, base: str, tensors: Mapping[str, Facts]) -> bool:
        """Whether a weight of that name may be stored so: by names, dtypes and whole codes."""
        if self.lacks(base, tensors):
            return False
        codes = tensors[base + self.codes][1]
        return len(codes) >= self.least_axes and codes[-1] * 8 % self.format.element.bits == 0

    def lacks(self, base: str, tensors: Mapping[str, Facts]) -> list[str]:
        """What a weight of that name would need, in words: tensors, or others of their dtypes."""
        parts = self.parts(base)
        dtypes = {"codes": (self.codes_dtype,), "scales": self.scales_dtypes}
        found = []
        for part, name in parts.items():
            wanted = dtypes.get(part)
            if name not in tensors:
                found.append(f"{name}, which is not there")
            elif wanted is not None and tensors[name][0] not in wanted:
                found.append(f"{name} of dtype {' or '.join(wanted)}, got {tensors[name][0]}")
        if self.rotation is not None and base + self.rotation not in tensors:
            found.append(f"{base + self.rotation}, which is not there")
        return found

    def fits(self, base: str, tensors: Mapping[str, Facts]) -> bool:
        """Whether the scales have the shape that the codes ask for, or leave out an axis of one."""
        parts = self.parts(base)
        expected = self.scales_shape(self.shape(tensors[parts["codes"]][1]))
        given = tensors[parts["scales"]][1]
        if self.padded and len(given) == 2:
            return given in (expected, (-(-expected[0] // 128) * 128, -(-expected[1] // 4) * 4))
        return given == expected or (*given, 1) == expected

    def used_by(self, config: Mapping[str, Any]) -> bool:
        """Whether a `quantization_config` names it."""
        return any(all(config.get(key) == value for key, value in pairs) for pairs in self.configs)
