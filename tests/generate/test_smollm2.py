"""SmolLM2-135M itself, in float32: logits of transformers, tokens of llama.cpp."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from mx_jax import checkpoint, recipes
from mx_jax.generate.config import GGUF, config_from_gguf
from mx_jax.generate.load import params_of
from mx_jax.generate.model import Llama
from mx_jax.generate.tokenizer import tokenizer_of_gguf
from tests.generate import smollm2
from tests.generate.test_model import logits_of_transformers

HERE = Path(__file__).parent
COMMITTED = json.loads((HERE / "smollm2.json").read_text())


@pytest.fixture(scope="module")
def file():
    return checkpoint.read(smollm2.path())


@pytest.mark.slow
def test_logits_are_those_of_transformers(file):
    config = config_from_gguf(file.metadata, file)
    params, model = params_of(file, config, GGUF), Llama(config, recipes.high_precision())
    tokens = np.array([COMMITTED["tokens"]], np.int32)
    logits, _ = jax.jit(model.apply)({"params": params}, tokens)
    # Every 997th of each token's; they reach 34.
    np.testing.assert_allclose(logits[0, :, ::997], COMMITTED["logits"], atol=2e-4)


@pytest.mark.slow
def test_committed_logits_are_those_of_transformers(file):
    config = config_from_gguf(file.metadata, file)
    tensors = {name: np.asarray(file[name]) for name in file}
    theirs = logits_of_transformers(config, tensors, [COMMITTED["tokens"]])
    np.testing.assert_allclose(theirs[0, :, ::997], COMMITTED["logits"], atol=2e-4)


@pytest.mark.slow
def test_tokens_are_those_of_llama_cpp(file):
    pytest.importorskip("tokenizers")
    tokenizer = tokenizer_of_gguf(file.metadata)
    for case in COMMITTED["llama.cpp"]:
        assert tokenizer.encode(case["text"]) == case["tokens"], case["text"]
    plain = COMMITTED["llama.cpp"][1]
    assert tokenizer.decode(plain["tokens"]) == plain["text"]
    assert tokenizer.stop == {2}
    asked = tokenizer.chat("Why?")
    assert "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant" in asked
