"""Models in a folder as the hub has them: quantized by a command, and run as they are stored."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

from mx_jax import checkpoint, only_backend, recipes
from mx_jax.cli import main
from mx_jax.generate.hub import config_from_json
from mx_jax.generate.load import open_model, recipe_for
from mx_jax.generate.model import Llama
from mx_jax.generate.weights import params_from_gguf, params_of, quantize_params
from mx_jax.mxarray import MXArray
from tests.generate import tiny
from tests.quick import quick

HIGH = recipes.high_precision()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    safetensors.numpy.save_file(tiny.hub_tensors(), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(tiny.HUB_CONFIG))
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors.index.json.txt").write_text("kept")
    return path


def logits(source, recipe, *, stored: bool = False):
    with only_backend("reference"):
        params = params_of(source.weights, source.config, source.names, stored=stored)
        params = quantize_params(params, recipe)
        apply = quick(Llama(source.config, recipe).apply)
        return params, apply({"params": params}, tiny.TOKENS)[0]


def test_a_folder_is_the_model_of_its_gguf_file(folder: Path):
    source = open_model(folder)
    assert source.config == tiny.CONFIG
    params = params_of(source.weights, source.config, source.names)
    expected = params_from_gguf(tiny.tensors(), tiny.CONFIG)
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "whole"),
    [
        (("--format", "mxfp4", "--keep", "", "--max-shard-size", "40kB"), True),
        # Seven products a layer instead of four to trace, with two scales each.
        pytest.param(("--format", "nvfp4"), False, marks=pytest.mark.slow),
        (("--format", "mxfp8_e4m3", "--to", "compressed-tensors"), True),
    ],
    ids=["own", "tensor scales", "others"],
)
def test_quantized_by_the_command_and_run_as_stored(
    folder: Path, tmp_path: Path, options: tuple[str, ...], whole: bool
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
    _, exact = logits(open_model(folder), HIGH)
    assert np.abs(found - exact).max() > 0.01


def test_activations_beside_what_is_stored():
    fwd = recipe_for(None, "mxint8").fwd
    assert fwd == recipes.MatmulSpec(lhs="mxint8", rhs=None)
    assert recipe_for("mxfp4", "mxint8").fwd.rhs is not None


def test_a_folder_is_not_written_over_unasked(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["quantize", str(folder), str(tmp_path / "out"), "--format", "mxfp4"]
    assert main(words) == 0
    capsys.readouterr()
    assert main(words) == 2
    assert "model.safetensors is there already; replace it with --force" in capsys.readouterr().err
    assert main([*words, "--force"]) == 0
    capsys.readouterr()
    assert main(["quantize", str(folder), str(folder), "--format", "mxfp4", "--force"]) == 2
    assert "is what is read; write to another folder" in capsys.readouterr().err
    assert checkpoint.read(folder).quantized == {}


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
