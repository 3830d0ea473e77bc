"""A recipe in levanter's Llama and trainer: needs levanter 1.2.dev1644, and `-m slow`."""

from typing import Any

import jax
import pytest

import mx_jax
from tests.examples.integrations.conftest import assert_learned

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def example(integration: Any) -> Any:
    pytest.importorskip("levanter")
    return integration("levanter_trainer")


def test_the_trainer_learns(example: Any):
    losses, report = example.main()
    assert len(losses) == 20
    assert_learned(losses, start=3.0)
    every = ("output", "grad_input", "grad_weight")
    blocks = "LlamaTransformer/layer/LlamaDecoderLayer"
    layers = ("Attention/Attention._compute_qkv/Linear", "Attention/Linear", "LlamaMlp/Linear")
    # XLA may compute some of them in other places too.
    assert report.quantized.items() >= {f"{blocks}/{layer}": every for layer in layers}.items()
    assert all("Llama" in layer for layer in report.quantized), report
    assert "Linear" in report.plain, "the head stays"


def test_the_configuration_builds_the_model_with_the_recipe(example: Any):
    config = example.MxLlamaConfig(
        seq_len=8, hidden_dim=32, intermediate_dim=32, num_layers=1, num_heads=1, num_kv_heads=1
    )
    model = jax.eval_shape(lambda: config.build(example.Vocab, key=jax.random.PRNGKey(0)))
    layers = jax.tree.leaves(model, is_leaf=lambda leaf: isinstance(leaf, example.hnn.Linear))
    linears = [leaf for leaf in layers if isinstance(leaf, example.hnn.Linear)]
    mine = example.MxDotGeneral(mx_jax.recipes.mxfp8())
    assert [layer.dot_general == mine for layer in linears] == [True] * 7 + [False]
