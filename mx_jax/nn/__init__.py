"""Flax layers: `linen` and `nnx`, and `KVCache` for attention that decodes."""

from mx_jax.nn import linen as linen
from mx_jax.nn import nnx as nnx
from mx_jax.nn.cache import KVCache as KVCache
from mx_jax.nn.serialization import register as _register

_register()
