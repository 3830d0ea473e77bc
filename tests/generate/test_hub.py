"""Models in a folder as the hub has them: quantized by a command, and run as they are stored."""

import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

import mx_jax
from mx_jax import only_backend, recipes
from mx_jax.cli import main
from mx_jax.generate.config import GGUF, config_from_json
from mx_jax.generate.load import (
    can_join,
    joined,
    open_model,
    params_of,
    quantized,
)
from mx_jax.generate.model import Llama
from mx_jax.inspect import explain
from mx_jax.mxarray import MXArray
from tests.generate import tiny
from tests.quick import quick

# A wave that is long and short at once.
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
HIGH = recipes.high_precision()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny.put_folder(tmp_path_factory.mktemp("model"))
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors.index.json.txt").write_text("kept")
    return path


def logits(source, recipe, *, stored: bool = False):
    with only_backend("reference"):
        given = source.weights, source.config, source.names
        params = params_of(*given, quantized({}, recipe), stored=stored)
        apply = quick(Llama(source.config, recipe).apply)
        return params, apply({"params": params}, tiny.TOKENS)[0]


@pytest.fixture(scope="module")
def exact(folder: Path) -> np.ndarray:
    """The logits of what is not quantized."""
    return logits(open_model(folder), HIGH)[1]


def test_a_folder_is_the_model_of_its_gguf_file(folder: Path):
    source = open_model(folder)
    assert source.config == tiny.CONFIG
    params = params_of(source.weights, source.config, source.names)
    expected = params_of(tiny.tensors(), tiny.CONFIG, GGUF)
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "whole"),
    [
        (("--format", "mxfp4", "--keep", "", "--max-shard-size", "40kB"), True),
        # Seven products a layer instead of four to trace, with two scales each.
        pytest.param(("--format", "nvfp4"), False, marks=pytest.mark.slow),
        (("--format", "nvfp4", "--to", "compressed-tensors"), True),
    ],
    ids=["own", "tensor scales", "shared tensor scales"],
)
def test_quantized_by_the_command_and_run_as_stored(
    folder: Path, exact: np.ndarray, tmp_path: Path, options: tuple[str, ...], whole: bool
):
    out = tmp_path / "small"
    assert main(["quantize", str(folder), str(out), *options]) == 0
    beside, given = (
        {path.name for path in where.iterdir() if ".safetensors" not in path.name}
        for where in (out, folder)
    )
    assert beside == given
    assert (len([*out.glob("*.safetensors")]) > 1) == ("--max-shard-size" in options)
    config = json.loads((out / "config.json").read_text())
    assert ("quantization_config" in config) == ("--to" in options)
    config.pop("quantization_config", None)
    assert config == {key: value for key, value in tiny.HUB_CONFIG.items() if value is not None}
    source = open_model(out)
    params, found = logits(source, HIGH, stored=True)
    kernels = params["layers_1"]
    assert ("qkv" in kernels and "gate_up" in kernels) is whole
    assert ("query" in kernels and "up" in kernels) is not whole
    assert isinstance(kernels["down"]["kernel"], MXArray)
    assert isinstance(params["embedding"], MXArray) is ("--keep" in options)
    # The same values in high precision.
    _, expected = logits(source, HIGH)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert np.abs(found - exact).max() > 0.01


def test_matrices_are_joined_under_a_tensor_scale_that_they_share():
    x = np.random.default_rng(0).standard_normal((8, 32)).astype(np.float32)
    first, second = (mx_jax.quantize(part, "nvfp4", tensor_scale=0.01) for part in (x, 2 * x))
    assert can_join([first, second])
    np.testing.assert_array_equal(joined([first, second]), np.concatenate([first, second]))
    assert not can_join([first, mx_jax.quantize(x, "nvfp4", tensor_scale=0.02)])
    assert not can_join([first, mx_jax.quantize(x, "mxfp4")])
    assert not can_join([first, x])


@pytest.mark.parametrize("shared", [True, False])
def test_explain_says_which_products_stay_apart(shared: bool):
    encode = functools.partial(mx_jax.quantize, tensor_scale=0.01 if shared else None)
    tensors = {
        name: encode(w, "nvfp4") if name.startswith("blk") and w.ndim == 2 else w
        for name, w in tiny.tensors().items()
    }
    params = params_of(tensors, tiny.CONFIG, GGUF, stored=True)
    apply = Llama(tiny.CONFIG, recipes.weight_only("nvfp4")).apply
    remarks = explain(lambda params: apply({"params": params}, tiny.TOKENS), params).remarks
    apart = [text.partition(" -> ")[0] for text in remarks if "share no tensor scale" in text]
    assert apart == ([] if shared else ["query, key, value", "gate, up"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "families llama, mistral, smollm, got model_type='gpt2'"),
        ({"hidden_size": None}, "config.json lacks the field hidden_size"),
        ({"rope_scaling": {"type": "yarn"}}, "default, linear, llama3, got rope_type='yarn'"),
        ({"attention_bias": True}, "needs attention_bias=False in config.json, got True"),
        ({"sliding_window": 1024}, "needs sliding_window=None in config.json, got 1024"),
    ],
    ids=["family", "missing", "rope", "bias", "window"],
)
def test_models_that_are_not_read(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_json(tiny.HUB_CONFIG | change, ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_hidden_layers": []},
            "whole number of at least 1 as num_hidden_layers, got .*=\\[\\]",
        ),
        ({"hidden_size": "abc"}, "as hidden_size, got hidden_size='abc'"),
        ({"vocab_size": 0}, "as vocab_size, got vocab_size=0"),
        ({"num_key_value_heads": True}, "got num_key_value_heads=True"),
        ({"sliding_window": "a"}, "got sliding_window='a'"),
        ({"max_position_embeddings": 2.5}, "got max_position_embeddings=2.5"),
        ({"rms_norm_eps": []}, r"finite number above 0 as rms_norm_eps, got rms_norm_eps=\[\]"),
        ({"rope_theta": float("nan")}, "got rope_theta=nan"),
        ({"rope_scaling": [1]}, r"needs a table as rope_scaling, got rope_scaling=\[1\]"),
        ({"rope_scaling": {"type": [1]}}, r"got rope_type=\[1\]"),
        (
            {"rope_scaling": {"type": "linear", "factor": {}}},
            "rope_type=.linear.: needs .* factor={}",
        ),
        ({"rope_scaling": LLAMA3}, "numbers of rope_type='llama3' divide by zero"),
    ],
    ids=[
        *("layers", "width", "vocabulary", "kv_heads", "window", "context", "epsilon", "theta"),
        *("rope", "kind", "factor", "waves"),
    ],
)
def test_fields_of_another_type(change, message, tmp_path: Path):
    """Refused by the file's path, the field and what it says."""
    with pytest.raises(ValueError, match=message) as raised:
        open_model(tiny.put_folder(tmp_path, **change))
    assert str(tmp_path / "config.json") in str(raised.value)


def test_fields_by_other_names_and_defaults():
    newer = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "head_dim": None}
    found = config_from_json(
        tiny.HUB_CONFIG | newer | {"num_key_value_heads": None}, {"lm_head.weight"}
    )
    assert (found.rope_theta, found.head_width, found.kv_heads) == (500.0, 16, 4)
    assert not found.tied and found.rope_divisors is None
    scaled = config_from_json(
        tiny.HUB_CONFIG | {"rope_scaling": {"type": "linear", "factor": 2.0}}, ()
    )
    assert scaled.rope_divisors == (2.0,) * 16


def test_a_file_without_a_config(tmp_path: Path):
    safetensors.numpy.save_file({"a": np.zeros(2, np.float32)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"no config.json in .*; `python -m mx_jax quantize"):
        open_model(tmp_path / "a.safetensors")
