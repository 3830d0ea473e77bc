"""The model of examples/generate: what its files say, its values, caches and weights as codes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from generate.config import GGUF, config_from_gguf, config_from_json, rope_divisors
from generate.load import can_join, formats_of, joined, open_model, params_of, quantized
from generate.model import Llama, is_quantized, rotations

import mx_jax
from mx_jax import MXArray, PackedMXArray, only_backend, recipes
from mx_jax.nn import KVCache
from tests.examples import tiny_llama as tiny
from tests.needs import needs_library
from tests.quick import quick

HIGH = recipes.high_precision()
# Of transformers.
LOGITS = json.loads(Path(__file__).with_name("tiny_llama.json").read_text())["logits"]


@pytest.fixture(scope="module")
def params():
    return params_of(tiny.tensors(), tiny.CONFIG, GGUF)


# What files say ----------------------------------------------------------------------------------

METADATA = {
    "general.architecture": "llama",
    "tokenizer.ggml.tokens": ["a"] * 96,
    "llama.embedding_length": 64,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.rope.dimension_count": 32,
    "llama.rope.freq_base": 100.0,
    "llama.feed_forward_length": 96,
}


def test_sizes_from_metadata_and_from_a_folder(tmp_path: Path):
    assert config_from_gguf(METADATA, {"token_embd.weight": None}) == tiny.CONFIG
    source = open_model(tiny.put_folder(tmp_path))
    assert source.config == tiny.CONFIG
    params = params_of(source.weights, source.config, source.names)
    expected = params_of(tiny.tensors(), tiny.CONFIG, GGUF)
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_fields_by_other_names_and_defaults():
    newer = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "head_dim": None}
    config = config_from_json(
        tiny.HUB_CONFIG | newer | {"num_key_value_heads": None}, {"lm_head.weight"}
    )
    assert (config.rope_theta, config.head_width, config.kv_heads) == (500.0, 16, 4)
    assert not config.tied and config.rope_divisors is None


def test_divisors_of_rotary_frequencies():
    freqs = np.linspace(1, 8, 16, dtype=np.float32)
    divided = config_from_gguf(METADATA, {"rope_freqs.weight": freqs})
    np.testing.assert_array_equal(divided.rope_divisors, freqs)
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert config_from_gguf(METADATA | linear, {}).rope_divisors == (4.0,) * 16
    angles = [
        np.arcsin(rotations(config, 1, 0.5)[1])[0, 0, :16] for config in (tiny.CONFIG, divided)
    ]
    np.testing.assert_allclose(angles[0] / angles[1], freqs, rtol=1e-4)


def test_llama3_divides_the_long_waves():
    """Llama 3.1's numbers; waves shorter than 2048 positions stay, longer than 8192 are 8 times as
    long."""
    said = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    said["original_max_position_embeddings"] = 8192
    divisors = np.array(rope_divisors(said, 500000.0, 128))
    waves = 2 * np.pi * 500000.0 ** (np.arange(64) / 64)
    assert (divisors[waves < 2048] == 1).all() and (divisors[waves > 8192] == 8).all()
    between = divisors[(waves > 2048) & (waves < 8192)]
    assert len(between) > 3 and (np.diff(between) > 0).all() and 1 < between[0] < between[-1] < 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type='llama' or 'mistral' or 'smollm' .* got 'gpt2'"),
        ({"hidden_size": None}, "needs a number above 0 as hidden_size, got hidden_size=None"),
        ({"num_hidden_layers": []}, r"as num_hidden_layers, got num_hidden_layers=\[\]"),
        ({"rope_theta": float("nan")}, "got rope_theta=nan"),
        ({"rope_scaling": {"type": "yarn"}}, "default, linear, llama3, got rope_type='yarn'"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "got low_freq_factor=None"),
        ({"attention_bias": True}, "needs attention_bias=False in config.json, got True"),
        ({"sliding_window": 1024}, "needs sliding_window=0 in config.json, got 1024"),
    ],
    ids=["family", "missing", "array", "nan", "rope", "llama3", "bias", "window"],
)
def test_models_that_are_not_read(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        config_from_json(tiny.HUB_CONFIG | change, ())


def test_files_that_lack_something(tmp_path: Path):
    with pytest.raises(ValueError, match=r"needs general.architecture='llama', got 'mamba'"):
        config_from_gguf({"general.architecture": "mamba"}, {})
    tensors = tiny.tensors()
    del tensors["blk.1.attn_q.weight"]
    with pytest.raises(ValueError, match=r"lacks the tensor 'blk.1.attn_q.weight'"):
        params_of(tensors, tiny.CONFIG, GGUF)
    (tiny.put_folder(tmp_path) / "config.json").unlink()
    with pytest.raises(ValueError, match=r"no config.json in .*; `python -m mx_jax quantize"):
        open_model(tmp_path)


# Values ------------------------------------------------------------------------------------------


def test_logits_are_those_of_transformers(params):
    model = Llama(tiny.CONFIG, HIGH)
    logits, none = quick(lambda params: model.apply({"params": params}, tiny.TOKENS))(params)
    assert none is None
    np.testing.assert_allclose(logits, np.array(LOGITS), atol=2e-5)


def test_token_by_token_is_all_at_once(params):
    model, config = Llama(tiny.CONFIG, HIGH), tiny.CONFIG
    step = quick(model.apply)
    whole, _ = step({"params": params}, tiny.TOKENS)
    held = (KVCache.zeros(2, 16, config.kv_heads, config.head_width),) * config.layers
    parts = []
    for first, last in [(0, 7), (7, 8), (8, 9)]:
        logits, held = step({"params": params}, tiny.TOKENS[:, first:last], held, first)
        parts.append(logits)
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=2e-5)


def leaves(params: Any) -> list[Any]:
    return jax.tree.leaves(params, is_leaf=is_quantized)


@needs_library
def test_packed_weights_give_what_their_values_give():
    config = dataclasses.replace(tiny.CONFIG, layers=1)
    with only_backend("cpu_ffi"):
        store = quantized(formats_of("mxfp4"), HIGH)
        packed = params_of(tiny.tensors(config), config, GGUF, store)
        logits, _ = quick(Llama(config, HIGH).apply)({"params": packed}, tiny.TOKENS)
    assert sum(isinstance(leaf, PackedMXArray) for leaf in leaves(packed)) == 5
    values = jax.tree.map(
        lambda x: x.dequantize() if is_quantized(x) else x, packed, is_leaf=is_quantized
    )
    exact, _ = quick(Llama(config, HIGH).apply)({"params": values}, tiny.TOKENS)
    np.testing.assert_allclose(logits, exact, atol=2e-5)


def test_activations_are_quantized_where_weights_are_codes(params):
    """Float32 weights, as the head's where only blocks are quantized, read what there is."""
    low = Llama(tiny.CONFIG, HIGH.with_(output=recipes.MatmulSpec(lhs="mxfp4", rhs=None)))
    exact = quick(Llama(tiny.CONFIG, HIGH).apply)({"params": params}, tiny.TOKENS)[0]
    same = quick(low.apply)({"params": params}, tiny.TOKENS)[0]
    np.testing.assert_array_equal(same, exact)
    down = params["layers_1"]["down"]["kernel"]
    params = params | {"layers_1": params["layers_1"] | {"down": {"kernel": cast(down, "mxint8")}}}
    quantized_down = quick(low.apply)({"params": params}, tiny.TOKENS)[0]
    assert np.abs(quantized_down - exact).max() > 0.1


def cast(kernel: jax.Array, format: str) -> MXArray:
    return mx_jax.quantize(kernel, format, axis=0)


# Codes as they are stored ------------------------------------------------------------------------


def test_matrices_are_joined_under_a_tensor_scale_that_they_share():
    x = np.random.default_rng(0).standard_normal((8, 32)).astype(np.float32)
    first, second = (mx_jax.quantize(part, "nvfp4", tensor_scale=0.01) for part in (x, 2 * x))
    assert can_join([first, second])
    np.testing.assert_array_equal(joined([first, second]), np.concatenate([first, second]))
    assert not can_join([first, mx_jax.quantize(x, "nvfp4", tensor_scale=0.02)])
    assert not can_join([first, mx_jax.quantize(x, "mxfp4")])
    assert not can_join([first, x])


# SmolLM2-135M itself, in float32: logits of transformers, tokens of llama.cpp --------------------

SMOLLM2 = json.loads(Path(__file__).with_name("smollm2.json").read_text())


@pytest.fixture(scope="module")
def smollm2():
    return open_model(tiny.smollm2())


@pytest.mark.slow
def test_logits_of_smollm2(smollm2):
    params = params_of(smollm2.weights, smollm2.config, smollm2.names)
    tokens = np.array([SMOLLM2["tokens"]], np.int32)
    apply = jax.jit(Llama(smollm2.config, HIGH).apply)
    logits, _ = apply({"params": params}, tokens)
    # Every 997th of each token's; they reach 34.
    np.testing.assert_allclose(logits[0, :, ::997], SMOLLM2["logits"], atol=2e-4)


@pytest.mark.slow
def test_tokens_of_smollm2(smollm2):
    pytest.importorskip("tokenizers")
    tokenizer = smollm2.tokenizer()
    for case in SMOLLM2["llama.cpp"]:
        assert tokenizer.encode(case["text"]) == case["tokens"], case["text"]
    plain = SMOLLM2["llama.cpp"][1]
    assert tokenizer.decode(plain["tokens"]) == plain["text"]
    assert tokenizer.stop == {2}
    assert "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant" in tokenizer.chat("Why?")
