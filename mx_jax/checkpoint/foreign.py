"""Checkpoints of others, tensor by tensor: a weight is known by names, dtypes and shapes."""

import dataclasses
import functools
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.checkpoint import files
from mx_jax.checkpoint.gguf import gguf_in, read_gguf
from mx_jax.checkpoint.layouts import ABSENT, LAYOUTS, Layout, config_of, named, stated_by
from mx_jax.checkpoint.scales import stored_parts
from mx_jax.checkpoint.torchao import NAMES, TORCHAO, read_torchao, torchao_parts
from mx_jax.checkpoint.weights import Described, Stored, Weights, stored_plain
from mx_jax.checkpoint.wire import DESCRIPTION, saved_weights
from mx_jax.mxarray import MXArray
from mx_jax.packed import unpacked


def read(path: str | os.PathLike[str], *, layout: str | None = None) -> Weights:
    """Open a checkpoint, one that `save` wrote or in a layout that is in use elsewhere.

    A folder with `config.json` says what it is; a bare file is read if its names, dtypes and shapes
    fit one layout. GGUF says itself what it holds. A tensor is read at its look-up, so a model
    may be larger than memory.

    Args:
      path: a GGUF file, a safetensors file, or a folder of these, with or without an index.
      layout: the name of one, to read this and no other; `mx_jax.checkpoint.LAYOUTS` has them.

    Returns:
      A mapping from names to MXArrays `[..., out, in]` and plain arrays; gpt-oss's experts are
      `[experts, in, out]`, as in the unquantized model.

    Raises:
      FileNotFoundError: there is nothing, or a file that the index names is missing.
      ValueError: a weight that fits two layouts, scales that fit none or have another shape, scales
        that are NaN or negative, a tensor scale that is stored the other way around, weights that
        ask something of their inputs (AWQ, SVDQuant, FP-Quant), methods that are not read (GPTQ),
        damaged files.

    Examples:
      >>> import os, tempfile, numpy as np, safetensors.numpy
      >>> from mx_jax import checkpoint
      >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
      >>> tensors = {
      ...     "up.weight_packed": np.full((8, 16), 0x22, np.uint8),
      ...     "up.weight_scale": np.full((8, 1), 128, np.uint8),
      ... }
      >>> safetensors.numpy.save_file(tensors, path)
      >>> weights = checkpoint.read(path)
      >>> weights["up.weight"].format.name, float(weights["up.weight"].dequantize()[0, 0])
      ('mxfp4', 2.0)
    """
    path = Path(path)
    where = f"checkpoint.read: {path}"
    gguf = gguf_in(path)
    if gguf is not None:
        if layout is not None:
            raise ValueError(f"{where}: GGUF says what it is; leave out layout={layout!r}")
        return read_gguf(gguf, where)
    opened, tensors = files.readers_of(path, where)
    if any(DESCRIPTION in reader.metadata for reader in opened):
        if layout not in (None, "mx_jax"):
            raise ValueError(
                f"{where}: mx_jax wrote it, and it says what it is; leave out layout={layout!r}"
            )
        return saved_weights(path, opened, where)
    metadata = {key: value for reader in opened for key, value in reader.metadata.items()}
    if layout in (None, TORCHAO) and NAMES in metadata:
        return Weights(path, read_torchao(opened, tensors, where), metadata)
    config = config_of(path)
    dtype = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    if dtype not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"{where}: config.json names dtype={dtype!r}, no dtype of a model")
    stated = {} if layout else stated_by(config, where)
    candidates = (named(layout),) if layout else [row for row in LAYOUTS if row.used_by(stated)]
    stored = _read_layouts(tensors, tuple(candidates) or LAYOUTS, jnp.dtype(dtype), where)
    return Weights(path, stored, metadata)


# Names that only a quantized weight's scales have: one that no weight takes is an error.
_SCALE_NAMES = tuple(
    {suffix for row in LAYOUTS for suffix in (row.scales, row.tensor_scale) if suffix}
    - {".scale", ".scales"}
)

# Dtypes that codes may have.
_CODES = {kind for row in LAYOUTS for kind in row.dtypes["codes"]} | {"F8_E5M2"}

# Tensors of methods that nothing here reads; as plain numbers they would be nonsense.
_UNREAD = {
    ".qzeros": "GPTQ or AWQ",
    ".g_idx": "GPTQ",
    ".absmax": "bitsandbytes",
    ".quant_map": "bitsandbytes",
    ".SCB": "bitsandbytes",
}

# What AWQ, SVDQuant and FP-Quant ask of inputs, or add to products. Unread, it would be missed.
_INPUTS = (".pre_quant_scale", ".svdquant_lora_a", ".svdquant_lora_b", ".forward_hadamard_matrix")


def _read_layouts(
    tensors: Mapping[str, files.Entry], candidates: tuple[Layout, ...], dtype: np.dtype, where: str
) -> dict[str, Stored]:
    """The tensors of files, those that are a quantized weight together as one of that dtype."""
    for suffix, method in _UNREAD.items():
        if unread := [name for name in tensors if name.endswith(suffix)]:
            raise ValueError(
                f"{where}: {len(unread)} tensors such as {unread[0]} belong to weights that "
                f"{method} quantized, which mx_jax does not read; take the unquantized model"
            )
    of_inputs = [name for name in tensors if name.endswith(_INPUTS)]
    if of_inputs:
        raise ValueError(
            f"{where}: {len(of_inputs)} tensors such as {of_inputs[0]} belong to weights of AWQ, "
            "SVDQuant or FP-Quant, which give nonsense without them, and mx_jax does not apply "
            "them; export the model without"
        )
    # Layouts that a weight may have, by its name, with the base of its tensors' names.
    accepting: dict[str, tuple[str, list[Layout]]] = {}
    for row in candidates:
        for base in (name.removesuffix(row.codes) for name in tensors if name.endswith(row.codes)):
            if not row.lacks(base, tensors):
                accepting.setdefault(base + row.weight, (base, []))[1].append(row)
    stored: dict[str, Stored] = {}
    plain = dict(tensors)
    for name, (base, rows) in accepting.items():
        fitting = [row for row in rows if row.misfit(base, tensors) is None]
        if not fitting:
            raise ValueError(f"{where}: {name} {rows[0].misfit(base, tensors)}")
        if len(fitting) > 1:
            raise ValueError(
                f"{where}: {name} fits several layouts: {', '.join(r.name for r in fitting)}; "
                "say which with layout=, at the command line with --from"
            )
        row = fitting[0]
        parts = {part: tensors[each] for part, each in row.parts(base).items()}
        fetch = functools.partial(_read_quantized, row, parts, dtype, f"{where}: {name}")
        shape = row.shape(parts["codes"])
        if row.transposes(name, len(shape)):
            shape = (shape[0], shape[2], shape[1])
            fetch = lambda fetch=fetch: fetch().mT  # noqa: E731
        stored[name] = Stored(
            shape=shape,
            nbytes=sum(entry.nbytes for entry in parts.values()),
            fetch=fetch,
            layout=row.name,
        )
        for each in row.parts(base).values():
            plain.pop(each, None)
    _check_left(plain, candidates, tensors, where)
    return stored | {n: stored_plain(entry, f"{where}: {n}") for n, entry in plain.items()}


def _check_left(
    left: Mapping[str, files.Entry],
    candidates: tuple[Layout, ...],
    tensors: Mapping[str, files.Entry],
    where: str,
) -> None:
    """ValueError for scales and codes that no row took, with what the nearest layout would need."""

    def needs(rows: Iterable[tuple[Layout, str]]) -> str:
        """What the layout that needs least lacks of weights whose tensors' names begin so."""
        # A tensor that is missing is likelier than one of another dtype.
        lacks = [(row.name, row.lacks(base, tensors)) for row, base in rows]
        count = lambda each: (sum(ABSENT not in text for text in each[1]), len(each[1]))  # noqa: E731
        row, lack = min(lacks, key=count)
        return f"{row} needs {' and '.join(lack)}"

    stated = len(candidates) < len(LAYOUTS)
    # E8M0 of whatever name, where something is left that may be its codes.
    codes = any(x.kind in _CODES for x in left.values())
    scales = [
        name
        for name, x in left.items()
        if name.endswith(_SCALE_NAMES)
        or (x.kind == "F8_E8M0" and (codes or "scale" in name.rpartition(".")[2]))
    ]
    if scales:
        of = "any layout that mx_jax reads"
        if stated:
            of = f"the layouts {', '.join(layout.name for layout in candidates)}"
        shown = ", ".join(f"{name} {left[name]}" for name in scales[:3])
        suffixes = [(row, s) for row in candidates for s in (row.scales, row.tensor_scale) if s]
        rows = [(row, scales[0].removesuffix(s)) for row, s in suffixes if scales[0].endswith(s)]
        nearest = "no such layout has scales of this name; mx_jax does not read it"
        raise ValueError(
            f"{where}: {len(scales)} scales belong to no weight of {of}: {shown}; "
            f"{needs(rows) if rows else nearest}"
        )
    # A bare file may hold float8 or integers without scales: there it takes a name that only codes
    # have, or something beside it that is called a scale.
    scaled = {name.rpartition(".")[0] for name in tensors if "scale" in name.rpartition(".")[2]}
    for name, one in left.items():
        certain = stated or name.rpartition(".")[0] in scaled
        rows = [
            (row, name.removesuffix(row.codes))
            for row in candidates
            if name.endswith(row.codes)
            and one.kind in row.dtypes["codes"]
            and len(one.shape) >= row.least_axes
            and (certain or row.codes != row.weight)
        ]
        if rows:
            raise ValueError(
                f"{where}: {name} {one} holds codes that no scales belong to: "
                f"{needs(rows)}; as plain numbers they would be nonsense"
            )


def _read_quantized(
    layout: Layout, parts: Mapping[str, files.Entry], dtype: np.dtype, where: str
) -> MXArray:
    described = Described(
        format=layout.format,
        blocks=layout.blocks,
        shape=layout.shape(parts["codes"]),
        dtype=dtype.name,
        # Codes whose dtype says what they are come one in a byte.
        packed=parts["codes"].dtype not in files.PACKED_BITS,
    )
    arrays = {part: np.asarray(entry) for part, entry in parts.items()}
    return described.assembled(arrays, where, layout=layout.name, divides=layout.divides)


# Writing ---------------------------------------------------------------------------------------


def write(
    path: str | os.PathLike[str],
    weights: Mapping[str, Any],
    *,
    layout: str,
    max_shard_size: int | None = None,
    progress: bool = False,
) -> None:
    """Write weights as others store them, in one safetensors file or several.

    What `read` gives goes back as it was. Each weight is fetched twice, to describe it and to write
    it, and one at a time is in memory: of `Weights` that are read from files, so a model larger
    than memory goes through. What is there stays until all is written, as with `save`.
    `quantization_config` gives what a model's config.json has to say of it.

    Args:
      path: of the file; of a folder, where there are to be several.
      weights: from names to MXArrays as `read` gives them, blocks along `in`, and plain arrays.
      layout: the name of one of `mx_jax.checkpoint.LAYOUTS`, or `"torchao"`.
      max_shard_size: bytes of tensors in a file, for files `model-00001-of-...` with an index.
      progress: whether to show a bar on stderr.

    Raises:
      ValueError: an MXArray of another format or other blocks than the layout's, whose name does
        not end as its weights do, or whose rows fill no whole bytes; two tensors of one name;
        blocks whose scales are NaN, infinite or negative.

    Examples:
      >>> import os, tempfile, jax.numpy as jnp, mx_jax
      >>> from mx_jax import checkpoint
      >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
      >>> weights = {"up.weight": mx_jax.quantize(jnp.ones((8, 32)), "mxfp4")}
      >>> checkpoint.write(path, weights, layout="mxfp4-pack-quantized")
      >>> checkpoint.read(path)["up.weight"].shape
      (8, 32)
    """
    files.check_size(max_shard_size, "checkpoint.write")
    entries, metadata = entries_of(weights, layout)
    sizes: Any = {"max_shard_size": max_shard_size, "progress": progress}
    files.write_files(Path(path), entries, lambda _: metadata, **sizes)


def entries_of(
    weights: Mapping[str, Any], layout: str
) -> tuple[dict[str, files.Entry], dict[str, str]]:
    """What `write` writes, tensors and metadata; ValueError where the layout cannot hold it."""
    row = None if layout == TORCHAO else named(layout)

    # A weight is fetched again when its turn comes.
    def parts_of(name: str) -> tuple[dict[str, files.Entry], dict[str, str]]:
        x = unpacked(weights[name])
        if row is None:
            return torchao_parts(name, x)
        return (
            _entries_of_weight(name, x, row)
            if isinstance(x, MXArray)
            else {name: files.Entry.of(x)}
        ), {}

    entries: dict[str, files.Entry] = {}
    metadata = {"format": "pt"}
    for name in weights:
        parts, said = parts_of(name)
        later = files.deferred(lambda name=name: parts_of(name)[0], parts)
        for key in parts:
            if key in entries:
                raise ValueError(f"checkpoint.write: two tensors would be named {key!r}")
            entries[key] = later[key]
        metadata |= said
    return entries, metadata | ({NAMES: json.dumps(list(weights))} if row is None else {})


def _entries_of_weight(name: str, x: MXArray, row: Layout) -> dict[str, files.Entry]:
    base, blocks = name.removesuffix(row.weight), row.blocks_of(name, x.ndim)
    facts = f"{name}: format={x.format.name}, shape={x.shape}, blocks={x.blocks}"
    if dataclasses.replace(x.format, name=row.format.name) != row.format or x.blocks != blocks:
        raise ValueError(
            f"checkpoint.write: {row.name} holds {row.format.name} with blocks={blocks}, got "
            f"{facts}; quantize it so, or transpose it"
        )
    if row.transposes(name, x.ndim):
        x = dataclasses.replace(jax.tree.map(_matrices_transposed, x), blocks=row.blocks)
    bits, width = x.format.element.bits, x.shape[-1] if x.ndim else 0
    if base + row.weight != name or width * bits % 8 or (row.split and width % 32):
        raise ValueError(
            f"checkpoint.write: {row.name} needs names that end in {row.weight!r} and rows of "
            f"whole {'blocks' if row.split else 'bytes'}, got {facts}"
        )
    dtypes = files.DTYPES[row.codes_dtype], files.DTYPES[row.scales_dtypes[0]]
    # Of dtypes that a file packs, whoever writes it does.
    bits = 8 if dtypes[0] in files.PACKED_BITS else bits
    last = (width // 32, 16) if row.split else (width * bits // 8,)
    count = math.prod(getattr(x.tensor_scale, "shape", ()))
    if row.tensor_scale is not None and count != 1:
        raise ValueError(f"checkpoint.write: needs one tensor scale, got {count}: {facts}")
    how: Any = {"scale_shape": row.scale_shape, "divides": row.divides}
    entries = stored_parts(x, name, (*x.shape[:-1], *last), dtypes, **how)
    return dict(zip(row.parts(base).values(), entries, strict=True))


def _matrices_transposed(x: jax.Array | files.Entry) -> files.Entry:
    """An array, or one that is made when its turn comes, with its last two axes exchanged."""
    entry = files.Entry.of(x)
    *outer, rows, columns = entry.shape
    swapped = lambda: np.asarray(entry).swapaxes(-2, -1)  # noqa: E731
    return files.Entry((*outer, columns, rows), entry.dtype, swapped)
