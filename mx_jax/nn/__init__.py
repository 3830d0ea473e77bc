"""Flax layers, `linen` and `nnx`; `KVCache` for attention that decodes; weights that stay codes."""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from mx_jax.nn import linen as linen
from mx_jax.nn.layers import join_stored as join_stored
from mx_jax.nn.layers import register_serialization as _register_serialization
from mx_jax.nn.layers import split_stored as split_stored

if _TYPE_CHECKING:
    from mx_jax.nn import nnx as nnx
    from mx_jax.nn.cache import KVCache as KVCache

_register_serialization()


def __getattr__(name: str) -> _Any:
    # flax.nnx takes a third of a second, which programs of flax.linen need not wait for.
    if name == "nnx":
        return _importlib.import_module(f"{__name__}.nnx")
    if name == "KVCache":
        return _importlib.import_module(f"{__name__}.cache").KVCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "KVCache", "nnx"})
