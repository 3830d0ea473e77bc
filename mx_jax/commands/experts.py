"""gpt-oss's experts, all of a layer in one tensor, as a matrix each: what other layouts hold.

The names are those of llm-compressor: `experts.7.up_proj.weight`, and `.bias`. Rows of gate and up
take turns in gpt-oss.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from mx_jax.checkpoint.folder import config_of
from mx_jax.checkpoint.layout import Layout
from mx_jax.checkpoint.weights import Stored, Weights

_FUSED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_bias)?")
# Of a fused tensor's rows, those of each matrix.
_ROWS = {
    "gate_up_proj": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)},
    "down_proj": {"down_proj": slice(None)},
}


def taken_apart(weights: Weights, row: Layout) -> Weights:
    """Weights with the experts of gpt-oss one by one, where a layout has a matrix for each module.

    The same codes, scales and biases, in other tensors. Nothing is read; when one is, the tensor
    that it is a part of is held until another's part is read.

    Raises:
      ValueError: gpt-oss as it was released, whose tensors have names of its own.
    """
    if row.weight != ".weight":
        return weights
    released = [name for name, layout in weights.quantized.items() if layout == "gpt-oss-original"]
    if released:
        raise ValueError(
            f"convert: {weights.path}: {row.name} holds a matrix for each Linear, and "
            f"{released[0]} is gpt-oss as it was released, which fuses attention as well, under "
            "names that no such program knows; convert the model of the hub"
        )
    fused = [name for name in weights if _is_fused(weights, name)]
    if not fused:
        return weights

    @functools.lru_cache(maxsize=1)
    def whole(name: str) -> Any:
        return weights.stored[name].look()

    stored: dict[str, Stored] = {}
    for name, one in weights.stored.items():
        if name in fused:
            stored |= _parts(name, one, functools.partial(whole, name))
        else:
            stored[name] = one
    return dataclasses.replace(weights, stored=stored)


def _is_fused(weights: Weights, name: str) -> bool:
    """Whether it is such a tensor of gpt-oss: other models' gate and up do not take turns."""
    found = _FUSED.fullmatch(name)
    if found is None:
        return False
    matrix = weights.stored.get(f"{found[1]}.{found[2]}")
    axes = 2 if found[3] else 3
    if matrix is None or len(weights.stored[name].shape) != axes:
        return False
    return matrix.layout == "gpt-oss" or config_of(weights.path).get("model_type") == "gpt_oss"


def _parts(name: str, one: Stored, whole: Callable[[], Any]) -> Iterator[tuple[str, Stored]]:
    """The tensors that a fused one becomes, expert by expert."""
    found = _FUSED.fullmatch(name)
    assert found is not None
    base, fused, bias = found.groups()
    experts, rows, *rest = one.shape
    for index in range(experts):
        for part, own in _ROWS[fused].items():
            count = len(range(rows)[own])
            read = functools.partial(_rows_of, whole, index, own)
            yield (
                f"{base}.{index}.{part}.{'bias' if bias else 'weight'}",
                dataclasses.replace(
                    one,
                    shape=(count, *rest),
                    nbytes=one.nbytes * count // (experts * rows),
                    fetch=functools.partial(_on_device, read),
                    host=None if one.host is None else read,
                ),
            )


def _rows_of(whole: Callable[[], Any], index: int, own: slice) -> Any:
    return whole()[index, own]


def _on_device(read: Callable[[], Any]) -> Any:
    return jax.tree.map(jnp.asarray, read())
