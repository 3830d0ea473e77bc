"""MXArrays as plain arrays: codes at their real width, scales, and a description beside them.

For what saves trees of arrays (orbax, msgpack, `np.savez`); `save` and `load` do it with
safetensors files. The description has every fact of the format: a reader needs no table of names.
"""

import dataclasses
import enum
import itertools
import json
import os
import re
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.checkpoint import files
from mx_jax.checkpoint.weights import (
    CODES,
    SCALES,
    TENSOR_SCALE,
    Described,
    Stored,
    Weights,
    stored_plain,
)
from mx_jax.codecs import packing
from mx_jax.codecs.blocks import check_parts
from mx_jax.formats import BlockFormat, BlockSize, Whole, block_format
from mx_jax.mxarray import MXArray
from mx_jax.packed import Quantized, unpacked

# Of the description, not of the package. A reader refuses what it does not know.
VERSION = 1
# The key of the description, by which `from_wire` knows a dict; in a file, of the metadata.
DESCRIPTION = "mx_jax"
Keys = tuple[str | int, ...]
_DTYPE_NAME = re.compile(r"(u?int|float|bfloat)\d+\w*")

# Descriptions ----------------------------------------------------------------------------------


def describe(x: MXArray) -> dict[str, Any]:
    """The static facts of an MXArray, ready for `json.dumps`."""
    facts = {"version": VERSION, "shape": x.shape, "dtype": x.dtype.name, "blocks": x.blocks}
    facts["format"] = dataclasses.asdict(x.format)
    return json.loads(json.dumps(facts, default=lambda size: size.value))


def description(x: MXArray, **more: object) -> np.ndarray:
    """The JSON of `describe`, and of `more`, as bytes."""
    return np.frombuffer(json.dumps(describe(x) | more).encode(), np.uint8)


def read_description(facts: Any, where: str) -> Described:
    """Check and read what `json.loads` gave."""
    try:
        if facts["version"] != VERSION:
            version = facts["version"]
            raise ValueError(f"is of version={version!r}, this mx_jax reads {VERSION}")
        # Later versions may say more.
        known = {name: facts[name] for name in ("format", "blocks", "shape", "dtype")}
        packed = facts.get("packed") is not False
        described: Described = from_json(Described, known | {"packed": packed}, "the description")
        # What has the right type, and is impossible all the same.
        least: list[tuple[int, int]] = [(length, 0) for length in described.shape]
        least += [(size, 1) for _, size in described.blocks if not isinstance(size, Whole)]
        for value, smallest in least:
            if value < smallest:
                raise ValueError(f"needs integers from {smallest}, got {value}")
        scale = described.format.scale
        if (scale.kind == "element") != (scale.element is not None):
            raise ValueError(f"a scale of kind={scale.kind!r} with element={scale.element}")
        if scale.bits != (32 if scale.is_float32 else 8):
            raise ValueError(f"a scale of kind={scale.kind!r} with bits={scale.bits}")
        named = [("dtype", described.dtype)]
        for each in (described.format.element, scale, scale.element):
            named += [("dtype_name", each.dtype_name)] if each and each.dtype_name else []
        for what, name in named:
            if not _DTYPE_NAME.fullmatch(name):
                raise ValueError(f"{what}={name!r} names no dtype")
        if not jnp.issubdtype(jnp.dtype(described.dtype), jnp.floating):
            raise ValueError(f"dtype={described.dtype!r} is no float dtype")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"{where}: its description is no MXArray's: {said}; was it damaged, or written by "
            "a newer mx_jax?"
        ) from error
    return described


def from_json(kind: Any, facts: Any, name: str) -> Any:
    """A value of a type, such as a dataclass, of what `json.loads` gave; ValueError for others."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        fitting = next((one for one in inner if _type_in_json(one) is type(facts)), inner[0])
        return from_json(fitting, facts, name)
    expected = _type_in_json(kind)
    if type(facts) is not expected or (origin is Literal and facts not in inner):
        raise ValueError(f"needs {name} of type {expected.__name__}, got {facts!r}")
    if origin is tuple:
        inner = inner[:1] * len(facts) if inner[-1] is ... else inner
        return tuple(from_json(k, each, name) for k, each in zip(inner, facts, strict=True))
    if dataclasses.is_dataclass(kind):
        fields, made = typing.get_type_hints(kind), typing.cast(Any, kind)
        read = {
            key: from_json(fields.get(key, type(None)), each, key) for key, each in facts.items()
        }
        return made(**read)
    return kind(facts) if expected is not kind and origin is None else facts


def _type_in_json(kind: type) -> type:
    if dataclasses.is_dataclass(kind):
        return dict
    if typing.get_origin(kind) is tuple:
        return list
    is_word = typing.get_origin(kind) is Literal or issubclass(kind, enum.Enum)
    return str if is_word else kind


# Trees -----------------------------------------------------------------------------------------


def from_packed(
    packed_codes: jax.Array,
    scales: jax.Array,
    *,
    format: BlockFormat | str,
    length: int,
    axis: int = -1,
    tensor_scale: jax.Array | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> MXArray:
    """An MXArray of codes several to a byte: undoes `MXArray.packed_codes`.

    Little-endian along the last axis: FP4 the first in the low nibble, FP6 four in three bytes.

    Args:
      packed_codes: uint8 `[..., ceil(length * bits / 8)]`.
      scales: one a block: uint8 (E8M0, biased by 127, or E4M3), or float32 where the format says.
      format: of the blocks, or its name; blocks of one position along the kept axes.
      length: of the last axis, in codes.
      axis: along which the blocks run.
      tensor_scale: float32 with an axis of length one for each of codes (NVFP4), else None.
      dtype: what `dequantize()` gives.

    Raises:
      ValueError: parts that do not fit together.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> x = mx_jax.quantize(jnp.arange(64.0).reshape(1, 64), "mxfp4")
      >>> y = mx_jax.checkpoint.from_packed(x.packed_codes, x.scales, format="mxfp4", length=64)
      >>> x.packed_codes.shape, bool((y.codes == x.codes).all())
      ((1, 32), True)
    """
    format = block_format(format)
    kept, contracting = format.block
    if kept != 1:
        raise ValueError(
            f"from_packed: needs blocks along one axis, got format={format.name} of "
            f"block={format.block}; build the MXArray from codes and scales"
        )
    codes = packing.unpack(packed_codes, format.element.bits, length)
    if not -codes.ndim <= axis < codes.ndim:
        raise ValueError(f"from_packed: axis={axis} is out of range for shape={codes.shape}")
    blocks: tuple[tuple[int, BlockSize], ...] = ((axis % codes.ndim - codes.ndim, contracting),)
    arrays = {CODES: codes, SCALES: scales, TENSOR_SCALE: tensor_scale}
    dtype = jnp.dtype(dtype).name
    described = Described(
        format=format, blocks=blocks, shape=codes.shape, dtype=dtype, packed=False
    )
    return described.built(arrays, "from_packed")


def to_wire(tree: object) -> Any:
    """A tree with each MXArray as a dict of plain arrays, for whatever saves trees of arrays.

    Codes are on the host at their real width: MXFP4 takes 4.25 bits an element. Weights that were
    packed for this machine go as the MXArray that they hold.

    Args:
      tree: any pytree with MXArrays.

    Returns:
      The tree with dicts of `mx_jax` (the description, JSON as uint8), `codes`, `scales` and, for
      NVFP4, `tensor_scale`, NumPy arrays, in place of MXArrays; all else as it is.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> from mx_jax import checkpoint
      >>> wire = checkpoint.to_wire(mx_jax.quantize(jnp.ones((64, 8)), "mxfp4", axis=0))
      >>> wire["codes"].shape, wire["scales"].shape
      ((64, 4), (2, 8))
      >>> checkpoint.from_wire(wire).format.name
      'mxfp4'
    """

    def go(leaf: object) -> Any:
        if not isinstance(leaf, Quantized):
            return leaf
        stored = unpacked(leaf)
        arrays = {name: np.asarray(part) for name, part in _parts(stored).items()}
        return {DESCRIPTION: description(stored), **arrays}

    return jax.tree.map(go, tree, is_leaf=lambda leaf: isinstance(leaf, Quantized))


def from_wire(tree: object) -> Any:
    """Undo `to_wire`.

    Args:
      tree: what was saved and read back: arrays of NumPy or JAX.

    Raises:
      ValueError: a description that is damaged or of a newer version, or arrays that do not fit.

    Examples:
      >>> import os, tempfile, jax.numpy as jnp, mx_jax, numpy as np
      >>> from mx_jax import checkpoint
      >>> q = mx_jax.quantize(jnp.ones((64, 8)), "mxfp4", axis=0)
      >>> path = os.path.join(tempfile.mkdtemp(), "q.npz")
      >>> np.savez(path, **checkpoint.to_wire(q))
      >>> with np.load(path) as file:
      ...     back = checkpoint.from_wire(dict(file))
      >>> bool((back.codes == q.codes).all()), back.blocks
      (True, ((-2, 32),))
    """

    def is_wire(node: object) -> bool:
        return isinstance(node, Mapping) and {DESCRIPTION, CODES, SCALES} <= set(node)

    def go(path: jax.tree_util.KeyPath, leaf: Any) -> Any:
        if not is_wire(leaf):
            return leaf
        where = f"from_wire: {jax.tree_util.keystr(path, simple=True, separator='/') or 'the tree'}"
        try:
            facts = json.loads(np.asarray(leaf[DESCRIPTION]).tobytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: its description is no JSON: {error}") from error
        return _assemble(read_description(facts, where), leaf, where)

    return jax.tree.map_with_path(go, tree, is_leaf=is_wire)


def _parts(x: MXArray) -> dict[str, files.Entry]:
    """An MXArray's arrays as they are stored, by name; each is fetched when its turn comes."""
    check_parts(x, "to_wire")
    bits = x.format.element.bits if x.ndim else 8
    facts: Any = {"format": x.format, "blocks": x.blocks, "dtype": x.dtype.name}
    shape = Described(shape=x.shape, **facts).stored_shape
    codes = files.Entry(shape, np.dtype("uint8"), lambda: packing.pack(np.asarray(x.codes), bits))
    entries = {CODES: codes, SCALES: files.Entry.of(x.scales)}
    whole = x.tensor_scale
    return entries if whole is None else entries | {TENSOR_SCALE: files.Entry.of(whole)}


def _assemble(described: Described, arrays: Mapping[str, Any], where: str) -> MXArray:
    """An MXArray of what `describe` and `_parts` gave; ValueError where they do not fit."""
    codes, expected = arrays[CODES], described.stored_shape
    if tuple(codes.shape) != expected or codes.dtype != np.uint8:
        raise ValueError(
            f"{where}: codes must be uint8 of shape={expected} for a tensor of "
            f"shape={described.shape} in {described.format.name}, got codes.dtype={codes.dtype}, "
            f"codes.shape={codes.shape}"
        )
    return described.built(arrays, where)


# Files -----------------------------------------------------------------------------------------


def save(
    path: str | os.PathLike[str],
    tree: Mapping[Any, Any],
    *,
    max_shard_size: int | None = None,
    progress: bool = False,
) -> None:
    """Write nested dicts of arrays and MXArrays to a safetensors file, or to several.

    Codes are written at their real width: MXFP4 4.25 bits an element, MXFP6 6.25, NVFP4 4.5. The
    header describes every format in full, so `load` needs nothing else, and other readers of
    safetensors find plain arrays, `<path>/codes` and `<path>/scales`. One tensor at a time is
    fetched from its device.

    What is there stays until all is written. A file takes its place when it is whole; where that is
    a link, what it names is replaced. Several files change with their index: the first are called
    `model-00001-of-00004.safetensors`, those that replace them
    `model-3f9c01d2-00001-of-00004.safetensors`, with digits that no other save has, and what they
    replace is removed at last. Readers that go by the index, as transformers and vLLM do, see one
    checkpoint, or miss a file that is removed meanwhile. Of several processes let one save.

    Args:
      path: of the file, `.safetensors` by custom; of a folder, where there are to be several.
      tree: nested dicts, such as linen's variables or `nnx.to_pure_dict(nnx.state(model))`. Weights
        that were packed for this machine are written as the MXArrays that they hold.
      max_shard_size: bytes of tensors in a file, for files `model-00001-of-...` with an index, each
        of which describes its own tensors.
      progress: whether to show a bar on stderr.

    Raises:
      TypeError: what is neither a dict nor an array.
      ValueError: two tensors of one name, a dtype that safetensors does not have, or one
        `model.safetensors` beside the index of other files.

    Examples:
      >>> import os, tempfile, jax.numpy as jnp, mx_jax
      >>> from mx_jax import checkpoint
      >>> kernel = mx_jax.quantize(jnp.ones((64, 8)), "mxfp4", axis=0)
      >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
      >>> checkpoint.save(path, {"kernel": kernel, "bias": jnp.zeros(8)})
      >>> checkpoint.load(path)["kernel"].format.name
      'mxfp4'
    """
    files.check_size(max_shard_size, "checkpoint.save")
    entries: dict[str, files.Entry] = {}
    # The tensor of each entry, and the description of each tensor.
    owner: dict[str, str] = {}
    described: dict[str, dict[str, Any]] = {}
    empty: list[Keys] = []
    for keys, leaf in _leaves(tree, ()):
        name = _joined(keys)
        if isinstance(leaf, Mapping):
            empty.append(keys)
            continue
        described[name], parts = {"path": list(keys)}, {name: leaf}
        if isinstance(leaf, Quantized):
            leaf = unpacked(leaf)
            described[name]["mx"] = describe(leaf)
            parts = {f"{name}/{part}": entry for part, entry in _parts(leaf).items()}
        for key, entry in parts.items():
            if key in entries:
                raise ValueError(f"checkpoint.save: two tensors would be named {key!r}; rename one")
            entries[key], owner[key] = files.Entry.of(entry), name

    def metadata(names: Collection[str]) -> dict[str, str]:
        tensor_names = dict.fromkeys(owner[name] for name in names)
        said: dict[str, Any] = {
            "version": VERSION,
            "tensors": [described[name] for name in tensor_names],
        }
        if empty and {*names} >= {*itertools.islice(entries, 1)}:  # the first file
            said["empty"] = empty
        return {"format": DESCRIPTION, DESCRIPTION: json.dumps(said)}

    files.write_files(
        Path(path),
        entries,
        metadata,
        max_shard_size=max_shard_size,
        progress=progress,
        group=owner.__getitem__,
    )


def load(path: str | os.PathLike[str], *, progress: bool = False) -> dict[Any, Any]:
    """Read what `save` wrote.

    Args:
      path: of the file, or of the folder.
      progress: whether to show a bar on stderr.

    Returns:
      The tree, of jax.Arrays and MXArrays of them, on the default device.

    Raises:
      FileNotFoundError: there is no file.
      ValueError: it is damaged, cut short, of a newer version, or none that `save` wrote; it holds
        tensors that its description lacks; or integers that do not fit JAX's 32 bits.

    Examples:
      >>> import os, tempfile, jax.numpy as jnp, mx_jax
      >>> from mx_jax import checkpoint
      >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
      >>> kernel = mx_jax.quantize(jnp.ones((64, 8)), "mxfp4", axis=0)
      >>> checkpoint.save(path, {"up": {"kernel": kernel}})
      >>> back = checkpoint.load(path)["up"]["kernel"]
      >>> back.shape, back.blocks, os.path.getsize(path) < 64 * 8 * 4
      ((64, 8), ((-2, 32),), True)
    """
    where = f"checkpoint.load: {os.fspath(path)}"
    weights = saved_weights(Path(path), files.readers_of(Path(path), where)[0], where)
    tree: dict[Any, Any] = {}
    total = sum(one.nbytes for one in weights.stored.values())
    with files.progress_bar("read", total, progress) as step:
        for name, one in weights.stored.items():
            put(tree, weights.metadata["paths"][name], one.fetch(), where)
            step(name, one.nbytes)
    for keys in weights.metadata["empty"]:
        put(tree, keys, {}, where)
    return tree


def saved_weights(path: Path, readers: Sequence[files.Reader], where: str) -> Weights:
    """What `save` wrote, each tensor read at its look-up.

    `metadata["paths"]` has the keys of each, `metadata["empty"]` those of dicts without any.
    """
    stored: dict[str, Stored] = {}
    paths: dict[str, Keys] = {}
    empty: list[Keys] = []
    for reader in readers:
        text = reader.metadata.get(DESCRIPTION)
        if text is None:
            raise ValueError(
                f"{where}: {reader.path.name} is a safetensors file that mx_jax did not write: its "
                f"metadata has no {DESCRIPTION!r}; read it with safetensors"
            )
        try:
            listed = json.loads(text)
            if listed["version"] != VERSION:
                raise ValueError(f"version={listed['version']!r}, this mx_jax reads {VERSION}")
            described = [(tuple(tensor["path"]), tensor.get("mx")) for tensor in listed["tensors"]]
            empty += (bare := [tuple(keys) for keys in listed.get("empty", ())])
            for keys in (*bare, *(keys for keys, _ in described)):
                if not keys or not all(isinstance(key, str | int) for key in keys):
                    raise ValueError(f"path={list(keys)!r}")
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"{where}: its metadata is damaged: {error}") from error
        undescribed, tensors = set(reader.tensors), []
        for keys, mx in described:
            name = _joined(keys)
            facts = None if mx is None else read_description(mx, f"{where}: {name}")
            # By what the format has, not by what is there: a tensor beside it may be called so.
            has_one = facts is not None and facts.format.tensor_scale
            held = (CODES, SCALES, TENSOR_SCALE) if has_one else (CODES, SCALES)
            part_names = {part: f"{name}/{part}" for part in held}
            undescribed -= {name} if facts is None else {*part_names.values()}
            tensors.append((name, keys, facts, part_names))
        if undescribed:
            raise ValueError(
                f"{where}: its metadata is damaged: they do not describe {min(undescribed)!r}, "
                f"which {reader.path.name} holds ({len(undescribed)} of {len(reader.tensors)} "
                "tensors)"
            )
        for name, keys, facts, part_names in tensors:
            at = f"{where}: {name}"
            if name in paths:
                raise ValueError(f"{where}: its metadata is damaged: {name} is there twice")
            paths[name] = keys
            if facts is None:
                stored[name] = stored_plain(reader[name], at)
            else:
                parts = {part: reader[part_name] for part, part_name in part_names.items()}
                stored[name] = _stored(parts, facts, at)
    return Weights(path, stored, {"paths": paths, "empty": empty})


def _stored(parts: Mapping[str, files.Entry], described: Described, where: str) -> Stored:
    def fetch() -> MXArray:
        arrays = {part: np.asarray(entry) for part, entry in parts.items()}
        return _assemble(described, arrays, where)

    nbytes = sum(entry.nbytes for entry in parts.values())
    return Stored(shape=described.shape, nbytes=nbytes, fetch=fetch, layout=DESCRIPTION)


def _leaves(node: object, keys: Keys) -> Iterator[tuple[Keys, Any]]:
    if isinstance(node, Mapping) and not node and keys:
        yield keys, node
    elif isinstance(node, Mapping):
        for key, value in node.items():
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise TypeError(
                    f"checkpoint.save: keys must be str or int, got {key!r} in "
                    f"{_joined(keys) or 'the top'}"
                )
            yield from _leaves(value, (*keys, key))
    elif isinstance(node, Quantized | jax.Array | np.ndarray | files.Entry) and keys:
        if not isinstance(node, Quantized) and jnp.issubdtype(node.dtype, jax.dtypes.prng_key):
            raise TypeError(
                f"checkpoint.save: {_joined(keys)} is a PRNG key; save jax.random.key_data of it"
            )
        yield keys, node
    else:
        raise TypeError(
            f"checkpoint.save: needs nested dicts of arrays and MXArrays, got "
            f"{type(node).__name__} at {_joined(keys) or 'the top'}; of a flax.nnx model save "
            "nnx.to_pure_dict(nnx.state(model)), of boxed linen parameters nn.meta.unbox(params)"
        )


def _joined(keys: Keys) -> str:
    return "/".join(map(str, keys))


def put(tree: dict[Any, Any], keys: Keys, leaf: object, where: str) -> None:
    """Enter a tensor at its path."""
    *outer, last = keys
    for key in outer:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ValueError(f"{where}: its metadata is damaged: {_joined(keys)} is below a tensor")
    if last in tree:
        raise ValueError(f"{where}: its metadata is damaged: {_joined(keys)} is there twice")
    tree[last] = leaf
