"""The tensors of a checkpoint by name, whoever wrote it; each is read at its look-up."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.checkpoint.files import DTYPES, PACKED_BITS, Entry
from mx_jax.checkpoint.scales import block_scales, tensor_scale
from mx_jax.codecs import packing
from mx_jax.codecs.blocks import Blocks, check_parts, scales_shape
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray

# Of the dtypes that files pack, what JAX has as well.
_IN_JAX = {DTYPES["F4"]}
# Bytes, as XLA aligns memory on CPUs.
_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Stored:
    """How one tensor is stored in a checkpoint.

    Attributes:
      shape: of the weight, its last axis the one that is contracted; of gpt-oss's experts the one
        before.
      nbytes: in the file, scales included.
      layout: what a quantized weight is stored as, by name; None of a plain array.
      dequantized: whether it is quantized in a way that no MXArray holds, and read as the float32
        values that it stands for.
      fetch: reads it.
      host: of a plain array that is stored as it is, reads it without a copy; else None.
      dtype: of such an array; None: known once it is read.

    Examples:
      >>> import os, tempfile, jax.numpy as jnp, mx_jax
      >>> from mx_jax import checkpoint
      >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
      >>> up = mx_jax.quantize(jnp.ones((8, 32)), "mxfp4")
      >>> checkpoint.write(path, {"up.weight": up}, layout="mxfp4-pack-quantized")
      >>> stored = checkpoint.read(path).stored["up.weight"]
      >>> stored.shape, stored.nbytes, stored.layout
      ((8, 32), 136, 'mxfp4-pack-quantized')
    """

    shape: tuple[int, ...]
    nbytes: int
    fetch: Callable[[], "MXArray | jax.Array"]
    layout: str | None = None
    dequantized: bool = False
    host: Callable[[], np.ndarray] | None = None
    dtype: np.dtype | None = None

    def look(self) -> "MXArray | jax.Array | np.ndarray":
        """Read it, a plain array as it is stored: jax might hold it in fewer bits."""
        return self.fetch() if self.host is None else self.host()


@dataclasses.dataclass(frozen=True, eq=False)
class Weights(Mapping[str, "MXArray | jax.Array"]):
    """The tensors of a checkpoint by name, each read at its look-up.

    A mapping: `weights["model.layers.0.mlp.up_proj.weight"]`, `dict(weights)`, `len(weights)`.
    Names and axes are the checkpoint's: weights `[out, in]`, blocks along `in`.

    Attributes:
      path: the file or folder.
      stored: of each tensor, how it is stored; nothing is read for it.
      metadata: what the file says of the model: of a GGUF file its keys with numbers, strings,
        tuples of strings and arrays; of safetensors strings.

    Examples:
      >>> import os, tempfile, jax.numpy as jnp, mx_jax
      >>> from mx_jax import checkpoint
      >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
      >>> tree = {"up": mx_jax.quantize(jnp.ones((64, 8)), "mxfp4", axis=0), "bias": jnp.zeros(8)}
      >>> checkpoint.save(path, tree)
      >>> weights = checkpoint.read(path)
      >>> sorted(weights), weights.quantized, weights["up"].shape
      (['bias', 'up'], {'up': 'mx_jax'}, (64, 8))
    """

    path: Path
    stored: Mapping[str, Stored]
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __iter__(self) -> Iterator[str]:
        yield from self.stored

    def __len__(self) -> int:
        return len(self.stored)

    def __contains__(self, name: object) -> bool:
        # That of Mapping would read the tensor.
        return name in self.stored

    def __getitem__(self, name: str) -> "MXArray | jax.Array":
        return self.stored[name].fetch()

    @property
    def quantized(self) -> dict[str, str]:
        """From the quantized weights' names to those of their layouts."""
        return {name: one.layout for name, one in self.stored.items() if one.layout is not None}

    def __repr__(self) -> str:
        quantized, layouts = self.quantized, []
        for layout in sorted(set(quantized.values())):
            names = [name for name, one in quantized.items() if one == layout]
            one = self.stored[names[0]]
            read = ", read as float32" * one.dequantized
            layouts.append(f"{len(names)} {layout}{read}")
        return (
            f"Weights({str(self.path)!r}, {len(self)} tensors, {len(quantized)} of them "
            f"quantized: {'; '.join(layouts) or 'none'})"
        )


def on_device(array: np.ndarray | jax.Array) -> jax.Array:
    """An array of a file on the default device, or one that is on a device already."""
    if isinstance(array, jax.Array):
        return array
    # Copied once on a CPU: XLA takes memory over that is aligned as its own, and NumPy's comes in
    # large pages, of which few have to be mapped. `jnp.asarray` takes several times as long.
    held = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    first = -held.ctypes.data % _ALIGNMENT
    held = held[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    held[...] = array
    placed: jax.Array = jax.device_put(held)
    return placed


def plain(array: np.ndarray, where: str) -> jax.Array:
    """An array of a file on the device; ValueError for what JAX, as it is set, does not hold."""
    if array.dtype in PACKED_BITS and array.dtype not in _IN_JAX:
        raise ValueError(
            f"{where}: has dtype={array.dtype}, which jax does not have; read(path).stored[name]"
            ".look() gives it as a NumPy array"
        )
    with np.errstate(all="ignore"):
        placed = on_device(array)
        lost = placed.dtype != array.dtype and _loses_values(array, np.asarray(placed))
    if lost:
        raise ValueError(
            f"{where}: has {array.dtype} values from {array.min()} up to {array.max()}, which jax "
            f"holds as {placed.dtype}; set jax_enable_x64"
        )
    return placed


def _loses_values(array: np.ndarray, held: np.ndarray) -> bool:
    """Whether integers are other numbers, or numbers infinite."""
    if array.dtype.kind in "iu":
        return bool((held != array).any())
    return bool((np.isinf(held) != np.isinf(array)).any())


def stored_plain(entry: Entry, where: str) -> Stored:
    """A tensor that is an array as it is in the file."""
    facts: Any = {"shape": entry.shape, "nbytes": entry.nbytes, "dtype": entry.dtype}
    return Stored(**facts, fetch=lambda: plain(entry.fetch(), where), host=entry.fetch)


# The arrays of an MXArray, by name.
CODES, SCALES, TENSOR_SCALE = "codes", "scales", "tensor_scale"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Described:
    """What a file says of an MXArray; `packed`: codes at their real width, or one in a byte."""

    format: BlockFormat
    blocks: Blocks
    shape: tuple[int, ...]
    dtype: str
    packed: bool = True

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of the codes, whose last axis is in bytes."""
        bits = self.format.element.bits if self.packed else 8
        *rows, last = self.shape or (1,)
        return (*rows, packing.packed_length(last, bits)) if self.shape else ()

    def built(self, arrays: Mapping[str, Any], where: str) -> MXArray:
        """An MXArray on the device, if its parts fit together; `where` begins the error."""
        codes, whole = arrays[CODES], arrays.get(TENSOR_SCALE)
        if self.packed and self.shape:
            codes = packing.unpack(codes, self.format.element.bits, self.shape[-1])
        array = MXArray(
            codes=on_device(codes),
            scales=on_device(arrays[SCALES]),
            tensor_scale=None if whole is None else jnp.asarray(whole),
            format=self.format,
            blocks=self.blocks,
            dtype=jnp.dtype(self.dtype),
        )
        check_parts(array, where)
        return array

    def assembled(
        self, arrays: Mapping[str, Any], where: str, *, layout: str, divides: bool = False
    ) -> MXArray:
        """A weight that others stored; ValueError for scales that are none."""
        codes, whole = arrays[CODES], arrays.get(TENSOR_SCALE)
        parts = {
            CODES: codes.view(np.uint8).reshape(self.stored_shape),
            SCALES: block_scales(arrays[SCALES], self.format, where).reshape(
                scales_shape(self.shape, self.blocks)
            ),
        }
        if self.format.tensor_scale or whole is not None:
            one = np.ones(1, np.float32) if whole is None else whole
            parts[TENSOR_SCALE] = tensor_scale(
                one, self.shape, divides=divides, layout=layout, where=where
            )
        return self.built(parts, where)
