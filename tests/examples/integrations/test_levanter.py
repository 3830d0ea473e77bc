"""A recipe in levanter's Llama and trainer: needs levanter 1.2.dev1644, and `-m slow`."""

from typing import Any

import pytest

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
