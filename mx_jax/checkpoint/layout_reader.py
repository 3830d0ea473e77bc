"""Quantized weights of safetensors files, by the rows of `LAYOUTS`."""

import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.checkpoint.layout import Facts, Layout
from mx_jax.checkpoint.matching import match
from mx_jax.checkpoint.safetensors_file import Reader, dtype_name
from mx_jax.checkpoint.scales import block_scales, tensor_scale
from mx_jax.checkpoint.weights import Stored, on_device, plain
from mx_jax.checkpoint.wire import checked
from mx_jax.codecs import packing
from mx_jax.formats import MXFP4
from mx_jax.mxarray import MXArray


def read_layouts(
    readers: Mapping[str, Reader],
    candidates: tuple[Layout, ...],
    *,
    dtype: np.dtype,
    rotated: bool,
    where: str,
) -> dict[str, Stored]:
    """The tensors of safetensors files, those that are a quantized weight together as one.

    Args:
      readers: the file of each tensor.
      candidates: layouts that may be there.
      dtype: of quantized weights, when dequantized.
      rotated: whether weights are wanted that take rotated inputs.
      where: how errors begin.

    Raises:
      ValueError: as `match` does, or for weights that take rotated inputs and are not wanted.
    """
    tensors: dict[str, Facts] = {
        name: (dtype_name(reader.tensors[name][0]), reader.tensors[name][1])
        for name, reader in readers.items()
    }
    quantized = match(tensors, candidates, where)
    stored: dict[str, Stored] = {}
    taken: set[str] = set()
    for name, (base, row) in quantized.items():
        names = row.parts(base)
        taken |= set(names.values())
        parts = {part: functools.partial(readers[n].read, n) for part, n in names.items()}
        stored[name] = Stored(
            shape=row.shape(tensors[names["codes"]][1]),
            nbytes=sum(nbytes_of(readers[n], n) for n in names.values()),
            fetch=functools.partial(_quantized, row, parts, dtype, f"{where}: {name}"),
            layout=row.name,
            rotation=_rotation(readers, base, row),
        )
    turned = [name for name, one in stored.items() if one.rotation is not None]
    if turned and not rotated:
        raise ValueError(
            f"{where}: {len(turned)} weights take inputs that were rotated, such as {turned[0]} by "
            f"{stored[turned[0]].rotation}; without that they give nonsense. Rotate the inputs, "
            "and say rotated=True"
        )
    for name in tensors:
        if name not in taken:
            stored[name] = stored_plain(readers[name], name, f"{where}: {name}")
    return stored


def _rotation(readers: Mapping[str, Reader], base: str, row: Layout) -> str | None:
    """The name of the matrix that a weight's inputs are multiplied by, if it changes them."""
    if row.rotation is None:
        return None
    name = base + row.rotation
    matrix = readers[name].read(name).astype(np.float32)
    same = matrix.ndim == 2 and np.array_equal(matrix, np.eye(*matrix.shape, dtype=np.float32))
    return None if same else name


def stored_plain(reader: Reader, name: str, where: str) -> Stored:
    """A tensor that is an array as it lies in the file."""

    def fetch() -> jax.Array:
        return plain(reader.read(name), where)

    dtype, shape, _ = reader.facts(name)
    host = functools.partial(reader.read, name)
    nbytes = nbytes_of(reader, name)
    return Stored(shape=shape, nbytes=nbytes, fetch=fetch, host=host, dtype=dtype)


def nbytes_of(reader: Reader, name: str) -> int:
    """Bytes of a tensor in its file."""
    dtype, shape, _ = reader.tensors[name]
    return math.prod(shape) * dtype.itemsize


def _quantized(
    layout: Layout, parts: Mapping[str, functools.partial], dtype: np.dtype, where: str
) -> MXArray:
    found = {part: read() for part, read in parts.items()}
    stored = found["codes"].view(np.uint8)
    shape = layout.shape(stored.shape)
    # Not -1: of no rows that could be any number.
    stored = stored.reshape(*shape[:-1], shape[-1] * layout.format.element.bits // 8)
    scales = found["scales"]
    if layout.padded:
        scales = scales[tuple(slice(count) for count in layout.scales_shape(shape))]
    whole = None
    if "tensor_scale" in found:
        whole = tensor_scale(
            found["tensor_scale"], shape, divides=layout.divides, layout=layout.name, where=where
        )
    if layout.exponents and whole is not None:
        powers = block_scales(scales, MXFP4, where).astype(np.int32) - 127
        scales, whole = np.ldexp(whole, powers), None
    scales = block_scales(scales, layout.format, where)
    codes = packing.unpack(stored, layout.format.element.bits, shape[-1])
    return checked(
        MXArray(
            codes=on_device(codes),
            scales=on_device(scales.reshape(layout.scales_shape(shape))),
            tensor_scale=None if whole is None else jnp.asarray(whole),
            format=layout.format,
            blocks=layout.blocks,
            dtype=dtype,
        ),
        where,
    )
