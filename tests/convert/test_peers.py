"""Models that this project did not write: converted, and run forward and backward.

They need packages that the other tests do not; docs/accuracy.md names them and the command. With
`-s`, the reports are printed.
"""

import importlib.util
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree

import mx_jax
from mx_jax import convert, recipes
from mx_jax.convert import Rule
from tests.examples.conftest import EXAMPLES, imported

from .helpers import products

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TOKENS = np.arange(32, dtype=np.int32).reshape(2, 16)
POSITIONS = np.broadcast_to(np.arange(16, dtype=np.int32), (2, 16))
# hidden size, layers, heads, feed-forward size
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}


def random_like(tree: Any) -> Any:
    """Values of a trained size: some packages start projections at zero, others at one."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    values = [
        jax.random.normal(key, leaf.shape, leaf.dtype)
        / np.sqrt(leaf.shape[0] if leaf.ndim > 1 else 1)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, values)


def judge(name: str, report: Any, run: Any, original: Any, converted: Any, params: Any) -> None:
    """Print the report and the measures; check them."""
    before, after = run(original)(params), run(converted)(params)
    gradients = [
        jax.grad(lambda params, module=module: jnp.sum(run(module)(params) ** 2))(params)
        for module in (original, converted)
    ]
    sqnr = mx_jax.inspect.sqnr_db(before, after)
    flat = [ravel_pytree(gradient)[0] for gradient in gradients]
    gradient_sqnr = mx_jax.inspect.sqnr_db(*flat)
    norms = jnp.linalg.norm(flat[0]) * jnp.linalg.norm(flat[1])
    cosine = float(jnp.vdot(*flat) / norms)
    print(f"\n{name}\n{report}")
    print(f"output {sqnr:.1f} dB, gradients {gradient_sqnr:.1f} dB, cosine {cosine:.4f}")
    assert np.all(np.isfinite(flat[1]))
    assert 0.97 < cosine < 0.99999
    assert 12 < sqnr < 45 and 8 < gradient_sqnr < 45


TEXT = {"vocab_size": 64, "max_position_embeddings": 32}
IMAGES = np.random.default_rng(1).standard_normal((2, 16, 16, 3), np.float32)


@pytest.mark.parametrize(
    ("model", "config", "options", "arguments", "num_converted"),
    [
        (
            "FlaxBertModel",
            "BertConfig",
            TEXT,
            (TOKENS, np.ones_like(TOKENS), np.zeros_like(TOKENS), POSITIONS, np.ones((2, 4))),
            17,
        ),
        (
            "FlaxLlamaForCausalLM",
            "LlamaConfig",
            TEXT,
            (TOKENS, np.ones_like(TOKENS), POSITIONS),
            19,
        ),
        ("FlaxViTModel", "ViTConfig", {"image_size": 16, "patch_size": 8}, (IMAGES,), 18),
    ],
)
def test_transformers(model: str, config: str, options: Any, arguments: Any, num_converted: int):
    transformers = pytest.importorskip("transformers")
    sizes = getattr(transformers, config)(**SIZES, **options)
    module = getattr(transformers, model)(sizes, _do_init=False).module
    rules = [Rule(".*", recipes.mxfp8())]
    if model == "FlaxViTModel":
        rules.append(Rule(".*patch_embeddings.*", recipes.mxfp8(), types=nn.Conv))
    report = convert.report(module, rules, *arguments)
    assert report.num_converted == num_converted
    params = random_like(module.init(jax.random.key(0), *arguments)["params"])

    def run(module):
        return lambda params: module.apply({"params": params}, *arguments)[0]

    judge(model, report, run, module, convert.linen(module, rules), params)


@pytest.mark.parametrize(("name", "model"), [("llama3", "Llama3"), ("qwen3", "Qwen3")])
def test_tunix(name: str, model: str):
    if importlib.util.find_spec("tunix") is None:
        pytest.skip("tunix is not installed")
    source = imported(EXAMPLES / "integrations", "tunix_rules").models(name)
    config = source.ModelConfig(
        num_layers=2,
        vocab_size=64,
        embed_dim=64,
        hidden_dim=128,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        rope_theta=10000,
        norm_eps=1e-5,
    )
    network = getattr(source, model)(config, rngs=nnx.Rngs(0))
    rules = [Rule(".*", recipes.mxfp8())]
    mask = jnp.tril(jnp.ones((2, 16, 16), bool))
    arguments = (TOKENS, POSITIONS, None, mask)
    report = convert.report(network, rules, *arguments)
    assert report.summary == "19 of 19 layers converted"
    _, params = nnx.split(network)

    def run(network):
        graph, _ = nnx.split(network)
        return lambda params: nnx.merge(graph, params)(*arguments)[0]

    assert products(run(convert.nnx(network, rules)), params) == {"mx_matmul": 19}

    judge(model, report, run, network, convert.nnx(network, rules), random_like(params))


def test_gpt2():
    """Its layers are not Flax's: modules and functions reach the same products."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=4, n_inner=128
    )
    outer = transformers.FlaxGPT2LMHeadModel(config, _do_init=False)
    with pytest.raises(TypeError, match=r"put it back: model._module = convert.linen"):
        convert.linen(outer, Rule(".*", recipes.mxfp8()))
    module, arguments = outer.module, (TOKENS, np.ones_like(TOKENS), POSITIONS)
    rules = Rule(".*", recipes.mxfp8())
    report = convert.report(module, rules, *arguments)
    kernels = [
        layer.kernel
        for layer in (decision.layer for decision in report.decisions)
        if layer.type.__name__[4:8] == "Conv"
    ]
    # Each block's c_attn, c_proj, c_fc, c_proj; the head is tied to the embedding.
    assert kernels == [(64, 192), (64, 64), (64, 128), (128, 64)] * 2
    assert report.num_converted == 13
    params = random_like(module.init(jax.random.key(0), *arguments)["params"])

    def run(module: Any) -> Any:
        return lambda params: module.apply({"params": params}, *arguments)[0]

    converted = convert.linen(module, rules, strict=True)
    assert products(run(converted), params) == {"mx_matmul": 13}
    function = convert.function(run(module), rules, weights=0, strict=True)
    np.testing.assert_array_equal(jax.jit(run(converted))(params), function(params))
    judge("FlaxGPT2LMHeadModel", report, run, module, converted, params)


def test_equinox():
    """Layers by their places in the model, which is an argument: trained, in cells too."""
    eqx = pytest.importorskip("equinox")
    model = {
        "mlp": eqx.nn.MLP(64, 64, 128, 2, key=jax.random.key(0)),
        "lstm": eqx.nn.LSTMCell(64, 32, key=jax.random.key(0)),
    }
    x = np.random.default_rng(0).standard_normal((32, 64), np.float32)

    def run(model: Any, x: Any) -> Any:
        hidden, _ = jax.lax.scan(
            lambda state, x: (model["lstm"](x, state), None), (x[0, :32], x[1, :32]), x
        )
        return jax.vmap(model["mlp"])(x), hidden

    def loss(model: Any, x: Any) -> Any:
        return jnp.mean((run(model, x)[0] - x) ** 2)

    rules = [Rule("mlp/.*", recipes.mxfp8()), Rule(".*", None, types=eqx.nn.LSTMCell)]
    report = convert.report(run, rules, model, x, weights=0)
    decisions = report.decisions
    assert [(by.layer.path, by.layer.shape, by.rule) for by in decisions] == [
        ("lstm", (64, 128), 1),
        ("lstm", (32, 128), 1),
        ("mlp/layers/0", (64, 128), 0),
        ("mlp/layers/1", (128, 128), 0),
        ("mlp/layers/2", (128, 64), 0),
    ]
    converted = eqx.filter_jit(convert.function(run, rules, weights=0, strict=True))
    before, after = run(model, x), converted(model, x)
    assert 20 < mx_jax.inspect.sqnr_db(before[0], after[0]) < 45
    np.testing.assert_allclose(before[1], after[1], rtol=1e-5, atol=1e-6)
    step = eqx.filter_jit(eqx.filter_value_and_grad(convert.function(loss, rules, weights=0)))
    first, _ = last, _ = step(model, x)
    for _ in range(20):
        last, gradient = step(model, x)
        model = eqx.apply_updates(model, jax.tree.map(lambda g: -g, gradient))
    assert last < 0.95 * first
