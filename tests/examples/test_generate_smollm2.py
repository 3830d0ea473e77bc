"""SmolLM2-135M itself, in float32: logits of transformers, tokens of llama.cpp."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from generate.load import open_model, params_of
from generate.model import Llama

from mx_jax import recipes
from tests.examples import tiny_llama

COMMITTED = json.loads(Path(__file__).with_name("smollm2.json").read_text())


@pytest.fixture(scope="module")
def source():
    return open_model(tiny_llama.smollm2())


@pytest.mark.slow
def test_logits_are_those_of_transformers(source):
    params = params_of(source.weights, source.config, source.names)
    tokens = np.array([COMMITTED["tokens"]], np.int32)
    apply = jax.jit(Llama(source.config, recipes.high_precision()).apply)
    logits, _ = apply({"params": params}, tokens)
    # Every 997th of each token's; they reach 34.
    np.testing.assert_allclose(logits[0, :, ::997], COMMITTED["logits"], atol=2e-4)


@pytest.mark.slow
def test_tokens_are_those_of_llama_cpp(source):
    pytest.importorskip("tokenizers")
    tokenizer = source.tokenizer()
    for case in COMMITTED["llama.cpp"]:
        assert tokenizer.encode(case["text"]) == case["tokens"], case["text"]
    plain = COMMITTED["llama.cpp"][1]
    assert tokenizer.decode(plain["tokens"]) == plain["text"]
    assert tokenizer.stop == {2}
    asked = tokenizer.chat("Why?")
    assert "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant" in asked
