"""Benchmarks of decoding: where a step's time goes, and tensor scales of caches."""

import jax.numpy as jnp
import numpy as np

from benchmarks.decode_worker import OTHER, time_of_parts
from benchmarks.language_model_formats import calibrated_scales, empty_caches
from benchmarks.llama import GGUF, Generator, Llama, params_of
from mx_jax import recipes
from mx_jax.nn.cache import read_rows
from tests.examples import tiny_llama as tiny


def test_where_a_step_spends_its_time():
    params = params_of(tiny.tensors(), tiny.CONFIG, GGUF)
    generator = Generator(model=Llama(tiny.CONFIG, recipes.high_precision()), params=params)
    spent = time_of_parts(generator, 12)
    assert {"qkv", "gate_up", "down", "head", "attention", "norm"} <= set(spent)
    assert 0 < sum(spent.values()) < 1 and spent.get(OTHER, 0) < 0.5 * sum(spent.values())


def test_calibrated_scales_are_of_each_layer():
    """The largest that was seen is the largest that NVFP4 holds, of keys and of values."""
    config, shape = tiny.CONFIG, (1, 3, tiny.CONFIG.kv_heads, tiny.CONFIG.head_width)
    seen = [
        cache.append(jnp.full(shape, -3.0 - index), jnp.full(shape, 0.5 + index), 1)
        for index, cache in enumerate(empty_caches(config, 8))
    ]
    scales = calibrated_scales(tuple(seen))
    assert scales == tuple(((3.0 + i) / 2688, (0.5 + i) / 2688) for i in range(config.layers))
    fixed = empty_caches(config, 8, scales, format="nvfp4")
    for index, cache in enumerate(fixed):
        assert cache.keys.tensor_scale is not None and cache.keys.tensor_scale.shape == (1, 1, 1, 1)
        # Twice as large is cut off.
        kept = cache.append(jnp.full(shape, -3.0 - index), jnp.full(shape, 1.0 + 2 * index), 0)
        np.testing.assert_allclose(read_rows(kept.keys)[:, :, :3], -3.0 - index, rtol=1e-6)
        np.testing.assert_allclose(read_rows(kept.values)[:, :, :3], 0.5 + index, rtol=1e-6)
