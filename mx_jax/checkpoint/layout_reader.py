"""Quantized weights of safetensors files, by the rows of `LAYOUTS`."""

import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.checkpoint.layouts import Facts, Layout
from mx_jax.checkpoint.matching import match
from mx_jax.checkpoint.safetensors_file import Reader, dtype_name
from mx_jax.checkpoint.scales import block_scales, tensor_scale
from mx_jax.checkpoint.weights import Stored, plain
from mx_jax.checkpoint.wire import checked
from mx_jax.codecs import packing
from mx_jax.mxarray import MXArray


def read_layouts(
    readers: Mapping[str, Reader], candidates: tuple[Layout, ...], dtype: np.dtype, where: str
) -> dict[str, Stored]:
    """The tensors of safetensors files, those that are a quantized weight together as one.

    Args:
      readers: the file of each tensor.
      candidates: layouts that may be there.
      dtype: of quantized weights, when dequantized.
      where: how errors begin.

    Raises:
      ValueError: as `match` does.
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
            nbytes=sum(_nbytes(readers[n], n) for n in names.values()),
            fetch=functools.partial(_quantized, row, parts, dtype, f"{where}: {name}"),
            layout=row.name,
        )
    for name in tensors:
        if name not in taken:
            stored[name] = stored_plain(readers[name], name, f"{where}: {name}")
    return stored


def stored_plain(reader: Reader, name: str, where: str) -> Stored:
    """A tensor that is an array as it lies in the file."""

    def fetch() -> jax.Array:
        return plain(reader.read(name), where)

    return Stored(shape=reader.tensors[name][1], nbytes=_nbytes(reader, name), fetch=fetch)


def _nbytes(reader: Reader, name: str) -> int:
    dtype, shape, _ = reader.tensors[name]
    return math.prod(shape) * dtype.itemsize


def _quantized(
    layout: Layout, parts: Mapping[str, functools.partial], dtype: np.dtype, where: str
) -> MXArray:
    found = {part: read() for part, read in parts.items()}
    stored = found["codes"].view(np.uint8)
    shape = layout.shape(stored.shape)
    stored = stored.reshape(*shape[:-1], -1)
    scales = block_scales(found["scales"], layout.format, where)
    whole = None
    if "tensor_scale" in found:
        whole = tensor_scale(
            found["tensor_scale"], shape, divides=layout.divides, layout=layout.name, where=where
        )
    codes = packing.unpack(stored, layout.format.element.bits, shape[-1])
    return checked(
        MXArray(
            codes=jnp.asarray(codes),
            scales=jnp.asarray(scales.reshape(layout.scales_shape(shape))),
            tensor_scale=None if whole is None else jnp.asarray(whole),
            format=layout.format,
            blocks=layout.blocks,
            dtype=dtype,
        ),
        where,
    )
