"""The Llama family: values, caches, packed weights."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from mx_jax import only_backend, recipes
from mx_jax.generate.config import GGUF, LlamaConfig, config_from_gguf, rope_divisors
from mx_jax.generate.load import formats_of, params_of, quantized
from mx_jax.generate.model import Llama, rotations
from mx_jax.nn import KVCache
from mx_jax.packed import PackedMXArray, Quantized
from tests.generate import tiny
from tests.needs import needs_library
from tests.quick import quick

HIGH = recipes.high_precision()
# Of transformers.
LOGITS = json.loads((Path(__file__).parent / "tiny_logits.json").read_text())["logits"]


@pytest.fixture(scope="module")
def params():
    return params_of(tiny.tensors(), tiny.CONFIG, GGUF)


def caches(format=None, length=16):
    config = tiny.CONFIG
    one = KVCache.zeros(2, length, config.kv_heads, config.head_width, format=format)
    return (one,) * config.layers


def test_logits_are_those_of_transformers(params):
    model = Llama(tiny.CONFIG, HIGH)
    logits, none = quick(lambda params: model.apply({"params": params}, tiny.TOKENS))(params)
    assert none is None
    np.testing.assert_allclose(logits, np.array(LOGITS), atol=2e-5)


def test_token_by_token_is_all_at_once(params):
    model = Llama(tiny.CONFIG, HIGH)

    @quick
    def step(params, tokens, caches, position):
        return model.apply({"params": params}, tokens, caches, position)

    whole, _ = quick(model.apply)({"params": params}, tiny.TOKENS)
    held, found = caches(), []
    for first, last in [(0, 7), (7, 8), (8, 9)]:
        logits, held = step(params, tiny.TOKENS[:, first:last], held, first)
        found.append(logits)
    np.testing.assert_allclose(np.concatenate(found, 1), whole, atol=2e-5)
    last, _ = quick(model.apply, static_argnames="last")({"params": params}, tiny.TOKENS, last=True)
    assert last.shape == (2, 1, tiny.CONFIG.vocabulary)
    np.testing.assert_allclose(last[:, 0], whole[:, -1], atol=1e-5)


@pytest.mark.slow
@needs_library
def test_packed_weights_give_what_their_values_give():
    recipe, formats = recipes.weight_only("mxfp4"), formats_of("mxfp4")
    config = dataclasses.replace(tiny.CONFIG, layers=1)
    params = params_of(tiny.tensors(config), config, GGUF)
    with only_backend("cpu_ffi"):
        packed = params_of(tiny.tensors(config), config, GGUF, quantized(formats, recipe))
    values = jax.tree.map(
        lambda leaf: leaf.dequantize() if isinstance(leaf, Quantized) else leaf,
        packed,
        is_leaf=lambda leaf: isinstance(leaf, Quantized),
    )
    assert sum(isinstance(leaf, PackedMXArray) for leaf in leaves(packed)) == 5
    with only_backend("cpu_ffi"):
        logits, _ = quick(Llama(config, recipe).apply)({"params": packed}, tiny.TOKENS)
    apply = quick(Llama(config, HIGH).apply)
    exact, _ = apply({"params": values}, tiny.TOKENS)
    np.testing.assert_allclose(logits, exact, atol=2e-5)
    rough, _ = apply({"params": params}, tiny.TOKENS)
    assert np.abs(logits - rough).max() > 0.05


def leaves(params):
    return jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, Quantized))


def test_head_of_its_own():
    config = LlamaConfig(**{**vars(tiny.CONFIG), "tied": False, "layers": 1})
    tensors = tiny.tensors(config)
    params = params_of(tensors, config, GGUF)
    logits, _ = quick(Llama(config, HIGH).apply)({"params": params}, tiny.TOKENS)
    halved = params | {"head": params["head"] / 2}
    half, _ = quick(Llama(config, HIGH).apply)({"params": halved}, tiny.TOKENS)
    np.testing.assert_allclose(half, logits / 2, atol=1e-6)


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


def test_sizes_from_metadata():
    assert config_from_gguf(METADATA, {"token_embd.weight": None}) == tiny.CONFIG


def test_divisors_of_rotary_frequencies():
    freqs = np.linspace(1, 8, 16, dtype=np.float32)
    found = config_from_gguf(METADATA, {"rope_freqs.weight": freqs})
    np.testing.assert_array_equal(found.rope_divisors, freqs)
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert config_from_gguf(METADATA | linear, {}).rope_divisors == (4.0,) * 16
    with pytest.raises(ValueError, match="default, linear, llama3, got rope_type='yarn'"):
        config_from_gguf(METADATA | {"llama.rope.scaling.type": "yarn"}, {})
    with pytest.raises(ValueError, match=r"len\(rope_divisors\)=3, head_width=32"):
        config_from_gguf(METADATA, {"rope_freqs.weight": freqs[:3]})
    angles = [np.arcsin(rotations(config, 1, 0.5)[1])[0, 0, :16] for config in (tiny.CONFIG, found)]
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
    with pytest.raises(ValueError, match="rope_type='llama3' lacks the field factor"):
        rope_divisors({"type": "llama3"}, 1e4, 64)


@pytest.mark.slow
def test_llama3_is_that_of_transformers():
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    said = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    said |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    config = transformers.LlamaConfig(head_dim=128, rope_parameters=said)
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** (-np.arange(64) / 64)
    divisors = rope_divisors(said, 500000.0, 128)
    np.testing.assert_allclose(plain / np.asarray(divisors), np.asarray(theirs), rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "mamba"}, "got general.architecture='mamba'"),
        ({"llama.block_count": None}, "lacks the field llama.block_count"),
        ({"llama.attention.head_count_kv": 3}, "heads=4, kv_heads=3"),
        ({"llama.attention.head_count": [4, 4]}, r"count, got llama.attention.head_count=\[4, 4\]"),
        ({"llama.rope.freq_base": "a"}, "the file: needs a finite number above 0 as llama.rope"),
        ({"llama.rope.dimension_count": 31}, "must be even, got head_width=31"),
    ],
    ids=["family", "missing", "heads", "array", "text", "odd"],
)
def test_sizes_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_gguf(METADATA | change, {})


def test_tensors_that_do_not_fit():
    tensors = tiny.tensors()
    missing = {name: each for name, each in tensors.items() if name != "blk.1.attn_q.weight"}
    with pytest.raises(ValueError, match=r"lacks the tensor 'blk.1.attn_q.weight'"):
        params_of(missing, tiny.CONFIG, GGUF)
    turned = tensors | {"blk.0.ffn_up.weight": tensors["blk.0.ffn_up.weight"].T}
    with pytest.raises(ValueError, match=r"shape=\(96, 64\), got shape=\(64, 96\)"):
        params_of(turned, tiny.CONFIG, GGUF)


def logits_of_transformers(config, tensors, tokens) -> np.ndarray:
    """The same model by transformers, with the same weights."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    theirs = transformers.LlamaConfig(
        vocab_size=config.vocabulary,
        hidden_size=config.width,
        intermediate_size=config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_width,
        rms_norm_eps=config.epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tied,
    )
    model = transformers.LlamaForCausalLM(theirs).eval()
    named = tiny.hub_tensors(tensors, config)
    named.setdefault("lm_head.weight", named["model.embed_tokens.weight"])
    state = {name: torch.from_numpy(np.array(value)) for name, value in named.items()}
    model.load_state_dict(state)
    with torch.no_grad():
        return model(torch.from_numpy(np.asarray(tokens, np.int64))).logits.numpy()


@pytest.mark.slow
def test_committed_logits_are_those_of_transformers():
    theirs = logits_of_transformers(tiny.CONFIG, tiny.tensors(), tiny.TOKENS)
    np.testing.assert_allclose(np.array(LOGITS, np.float32), theirs, atol=2e-5)
