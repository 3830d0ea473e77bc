"""A tree of weights, quantized or not, in safetensors files, and back."""

import functools
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.checkpoint.folder import Resume, check_sizes, progress_bar, readers_of, write_files
from mx_jax.checkpoint.safetensors_file import Entry, Reader
from mx_jax.checkpoint.weights import Stored, Weights, stored_plain
from mx_jax.checkpoint.wire import (
    CODES,
    SCALES,
    TENSOR_SCALE,
    VERSION,
    Described,
    assemble,
    describe,
    parts,
)
from mx_jax.mxarray import MXArray
from mx_jax.packed import Quantized, unpacked

# The key of the header's metadata.
_OURS = "mx_jax"
Keys = tuple[str | int, ...]


def save(
    path: str | os.PathLike[str],
    tree: Mapping[Any, Any],
    *,
    max_shard_size: int | None = None,
    resume: Resume = False,
    progress: bool = False,
) -> None:
    """Write nested dicts of arrays and MXArrays to a safetensors file, or to several.

    Codes are written at their real width: MXFP4 4.25 bits an element, MXFP6 6.25, NVFP4 4.5. The
    header describes every format in full, so `load` needs nothing else, and other readers of
    safetensors find plain arrays, `<path>/codes` and `<path>/scales`. One tensor at a time is
    fetched from its device.

    What is there stays as it is until all is written; killed at any moment, `load` gives all of the
    old or all of the new. A file takes its place when it is whole. Several files change with their
    index: where an earlier one names `model-00001-of-00004.safetensors` a new one gets
    `model-00001-of-00004-2.safetensors`, and what is replaced is removed at last. Readers that go
    by the index, as transformers and vLLM do, see one checkpoint.

    Args:
      path: of the file, `.safetensors` by custom; of a folder, where there are to be several.
      tree: nested dicts, such as linen's variables or `nnx.to_pure_dict(nnx.state(model))`. Weights
        that were packed for this machine are written as the MXArrays that they hold.
      max_shard_size: bytes of tensors in a file, for files `model-00001-of-...` with an index, each
        of which describes its own tensors.
      resume: whether to keep whole files that an earlier call left behind, if they hold the same
        values. Each is fetched and compared; with `"vouched"` only the first of a file, which is
        for a caller who knows that the earlier call was for the same, and whose values take long.
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
    check_sizes(max_shard_size, resume, "checkpoint.save")
    entries, owner, described = _taken_apart(tree)

    def metadata(names: Collection[str]) -> dict[str, str]:
        own = dict.fromkeys(owner[name] for name in names)
        said = {"version": VERSION, "tensors": [described[name] for name in own]}
        return {"format": _OURS, _OURS: json.dumps(said)}

    sizes: Any = {"largest": max_shard_size, "resume": resume, "progress": progress}
    write_files(Path(path), entries, metadata, group=owner.__getitem__, **sizes)


def _taken_apart(
    tree: Mapping[Any, Any],
) -> tuple[dict[str, Entry], dict[str, str], dict[str, dict[str, Any]]]:
    """A tree's entries, the tensor that each belongs to, and what is said of each tensor."""
    entries: dict[str, Entry] = {}
    described: dict[str, dict[str, Any]] = {}
    owner: dict[str, str] = {}
    for keys, leaf in _leaves(tree, ()):
        name = "/".join(map(str, keys))
        listed: dict[str, Any] = {"path": list(keys)}
        if isinstance(leaf, Quantized):
            leaf = unpacked(leaf)
            listed["mx"] = describe(leaf)
            found = {f"{name}/{part}": entry for part, entry in parts(leaf).items()}
        else:
            found = {name: Entry.of(leaf)}
        for key, entry in found.items():
            if key in entries:
                raise ValueError(f"checkpoint.save: two tensors would be named {key!r}; rename one")
            entries[key] = entry
            owner[key] = name
        described[name] = listed
    return entries, owner, described


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
    weights = own_weights(Path(path), readers_of(Path(path), where)[0], where)
    tree: dict[Any, Any] = {}
    total = sum(one.nbytes for one in weights.stored.values())
    with progress_bar("read", total, progress) as step:
        for name, one in weights.stored.items():
            put(tree, weights.metadata["paths"][name], one.fetch(), where)
            step(name, one.nbytes)
    return tree


def is_own(readers: Sequence[Reader]) -> bool:
    """Whether `save` wrote one of a checkpoint's files."""
    return any(_OURS in reader.metadata for reader in readers)


def own_weights(path: Path, readers: Sequence[Reader], where: str) -> Weights:
    """What `save` wrote, each tensor read when it is asked for.

    Names are the tree's keys joined by `/`, and `metadata["paths"]` has the keys of each.

    Args:
      path: of the file or folder.
      readers: of the file, or of all of the folder's.
      where: how errors begin.

    Raises:
      ValueError: their metadata are damaged, of a newer version, or name what is not there; or
        some of the files are not what `save` wrote.
    """
    stored, paths = {}, {}
    for reader in readers:
        for keys, mx in _listed(reader, where):
            name = "/".join(map(str, keys))
            if name in paths:
                raise ValueError(f"{where}: its metadata is damaged: {name} is there twice")
            paths[name] = keys
            at = f"{where}: {name}"
            if mx is None:
                stored[name] = stored_plain(reader, name, at)
                continue
            described = Described.read(mx, at)
            stored[name] = Stored(
                shape=described.shape,
                nbytes=sum(map(reader.nbytes, _parts(reader, name))),
                fetch=functools.partial(_fetch, reader, name, described, at),
                layout=_OURS,
            )
    return Weights(path, stored, {"paths": paths})


def _parts(reader: Reader, name: str) -> list[str]:
    """Tensors of an MXArray; what is not there is an error, but for the tensor scale."""
    own = [CODES, SCALES]
    own += [TENSOR_SCALE] * (f"{name}/{TENSOR_SCALE}" in reader.tensors)
    return [f"{name}/{part}" for part in own]


def _fetch(reader: Reader, name: str, described: Described, where: str) -> MXArray:
    arrays = {each.rpartition("/")[2]: reader.read(each) for each in _parts(reader, name)}
    return assemble(described, arrays, where)


def _leaves(node: Any, keys: Keys) -> Iterator[tuple[Keys, Any]]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise TypeError(
                    f"checkpoint.save: keys must be str or int, got {key!r} in {_shown(keys)}"
                )
            yield from _leaves(value, (*keys, key))
    elif isinstance(node, Quantized | jax.Array | np.ndarray | Entry) and keys:
        if not isinstance(node, Quantized) and jnp.issubdtype(node.dtype, jax.dtypes.prng_key):
            raise TypeError(
                f"checkpoint.save: {_shown(keys)} is a PRNG key; save jax.random.key_data of it"
            )
        yield keys, node
    else:
        raise TypeError(
            f"checkpoint.save: needs nested dicts of arrays and MXArrays, got "
            f"{type(node).__name__} at {_shown(keys)}; of a flax.nnx model save "
            "nnx.to_pure_dict(nnx.state(model)), of boxed linen parameters nn.meta.unbox(params)"
        )


def _shown(keys: Keys) -> str:
    return "/".join(map(str, keys)) or "the top"


def _listed(reader: Reader, where: str) -> Iterator[tuple[Keys, Any]]:
    """Paths of the tensors, with the description of those that are MXArrays."""
    text = reader.metadata.get(_OURS)
    if text is None:
        raise ValueError(
            f"{where}: {reader.path.name} is a safetensors file that mx_jax did not write: its "
            f"metadata has no {_OURS!r}; read it with safetensors"
        )
    try:
        listed = json.loads(text)
        if listed["version"] != VERSION:
            raise ValueError(f"version={listed['version']!r}, this mx_jax reads {VERSION}")
        paths = [(tuple(tensor["path"]), tensor.get("mx")) for tensor in listed["tensors"]]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{where}: its metadata is damaged: {error}") from error
    for keys, _ in paths:
        if not keys or not all(isinstance(key, str | int) for key in keys):
            raise ValueError(f"{where}: its metadata is damaged: path={list(keys)!r}")
    names = [("/".join(map(str, keys)), mx) for keys, mx in paths]
    said = [n for name, mx in names for n in ([name] if mx is None else _parts(reader, name))]
    if lost := sorted(set(reader.tensors) - set(said)):
        raise ValueError(
            f"{where}: its metadata is damaged: they do not describe {lost[0]!r}, which "
            f"{reader.path.name} holds ({len(lost)} of {len(reader.tensors)} tensors)"
        )
    yield from paths


def put(tree: dict[Any, Any], keys: Keys, leaf: Any, where: str) -> None:
    """Enter a tensor at its path."""
    *outer, last = keys
    for key in outer:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ValueError(f"{where}: its metadata is damaged: {_shown(keys)} is below a tensor")
    if last in tree:
        raise ValueError(f"{where}: its metadata is damaged: {_shown(keys)} is there twice")
    tree[last] = leaf
