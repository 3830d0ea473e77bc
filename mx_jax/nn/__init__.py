"""Flax layers, `linen` and `nnx`; `KVCache` for attention that decodes; weights that stay codes."""

from mx_jax.nn import linen as linen
from mx_jax.nn import nnx as nnx
from mx_jax.nn.cache import KVCache as KVCache
from mx_jax.nn.stored import join_stored as join_stored
from mx_jax.nn.stored import register_serialization as _register_serialization
from mx_jax.nn.stored import split_stored as split_stored

_register_serialization()
