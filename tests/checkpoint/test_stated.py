"""What config.json says of quantized weights: by it, our reader and others' find the layout."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mx_jax import checkpoint
from mx_jax.checkpoint.layouts import LAYOUTS, named
from mx_jax.commands import main
from tests.checkpoint.stored import draw, put_model

# Found by names, dtypes and shapes alone: without a configuration, or written by Quark.
UNSTATED = {"gpt-oss-original", "quark-mxfp4", "quark-float8", "mxfp6-e2m3", "mxfp6-e3m2"}


def weights_of(row: checkpoint.Layout, rng: np.random.Generator) -> dict[str, Any]:
    x = draw(row.format, (2, 8, 64) if row.split else (8, 64), rng)
    return {
        f"model.layers.0.up{row.weight}": x,
        "model.embed_tokens.weight": jnp.ones((4, 64)),
        "model.layers.0.gate.weight": jnp.ones((2, 64)),
        "model.norm.weight": jnp.ones(64),
    }


def test_our_reader_finds_what_is_stated(tmp_path: Path, rng: np.random.Generator):
    for row in LAYOUTS:
        weights = weights_of(row, rng)
        stated = checkpoint.quantization_config(weights, layout=row.name)
        assert (stated is None) == (row.name in UNSTATED), row.name
        if stated is None:
            continue
        put_model(tmp_path / row.name, weights, {"quantization_config": stated}, row.name)
        result = checkpoint.read(tmp_path / row.name).quantized
        assert [*result.values()] == [row.name] and row.used_by(stated)
        # Norms are no matrices; a head without a tensor is tied, and no matrix of its own.
        ignored = stated.get("ignore", stated.get("modules_to_not_convert"))
        assert ignored == ["model.embed_tokens", "model.layers.0.gate", "lm_head"], row.name


def test_what_is_said_of_inputs_and_embeddings(rng: np.random.Generator):
    layout = "modelopt-nvfp4"
    weights = weights_of(named(layout), rng)
    stated: Any = checkpoint.quantization_config(weights, layout=layout)
    (group,) = stated["config_groups"].values()
    assert stated["quant_algo"] == "W4A16_NVFP4" and "input_activations" not in group
    source = weights | {"model.layers.0.up.input_scale": jnp.ones(())}
    stated = checkpoint.quantization_config(source, layout=layout)
    assert stated["quant_algo"] == "NVFP4"
    assert stated["config_groups"]["group_0"]["input_activations"]["group_size"] == 16
    embedded = {"model.embed_tokens.weight": weights["model.layers.0.up.weight"]}
    embedded |= {"lm_head.weight": jnp.ones((2, 64))}
    stated = checkpoint.quantization_config(embedded, layout=layout)
    assert stated["config_groups"]["group_0"]["targets"] == ["Linear", "model.embed_tokens"]
    assert stated["ignore"] == ["lm_head"]
    # Two programs use this one.
    eight = weights_of(named("mxfp8-quantized"), rng)
    for program in ("compressed-tensors", "modelopt"):
        stated = checkpoint.quantization_config(eight, layout="mxfp8-quantized", program=program)
        assert stated["quant_method"] == program
    assert checkpoint.quantization_config(weights, layout=layout, program="fp8") is None


def test_commands_state_it(tmp_path: Path):
    """In config.json, in ModelOpt's own file as well; what is no longer so goes."""
    model = tmp_path / "model"
    up = np.random.default_rng(0).standard_normal((8, 64), np.float32)
    put_model(model, {"up.weight": up}, {"model_type": "llama"})

    def run(*words: Any) -> dict[str, Any]:
        assert main([str(word) for word in words]) == 0
        return json.loads((Path(words[2]) / "config.json").read_text())

    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    config = run("quantize", model, theirs, "--format", "mxfp8_e4m3", "--to", "modelopt")
    assert config["model_type"] == "llama"
    assert config["quantization_config"]["quant_algo"] == "MXFP8"
    said = json.loads((theirs / "hf_quant_config.json").read_text())
    assert said["quantization"] == {
        "quant_algo": "MXFP8",
        "kv_cache_quant_algo": None,
        "group_size": 32,
        "exclude_modules": ["lm_head"],
    }
    assert checkpoint.read(theirs).quantized == {"up.weight": "mxfp8-quantized"}
    assert "quantization_config" not in run("convert", theirs, ours, "--to", "mx_jax")
    # Without config.json's word, ModelOpt's own file is heard.
    (theirs / "config.json").write_text(json.dumps({"model_type": "llama"}))
    said["quantization"]["quant_algo"] = "NVFP4"
    (theirs / "hf_quant_config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match="no weight of the layouts modelopt-nvfp4"):
        checkpoint.read(theirs)
    # Another layout in the same folder: ModelOpt's file would be wrong.
    words = ("convert", ours, theirs, "--to", "compressed-tensors", "--force")
    assert run(*words)["quantization_config"]["quant_method"] == "compressed-tensors"
    assert not (theirs / "hf_quant_config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mxfp4", "mxfp6", "mxfp8", "nvfp4", "fp8"])
def test_classes_of_compressed_tensors(name: str, rng: np.random.Generator):
    """The scheme is the one that compressed-tensors itself has for such weights."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationConfig, quant_scheme

    others = {"mxfp8": "mxfp8-quantized", "fp8": "float-quantized"}
    layout = others.get(name, f"{name}-pack-quantized")
    stated = checkpoint.quantization_config(weights_of(named(layout), rng), layout=layout)
    result = QuantizationConfig.model_validate(json.loads(json.dumps(stated)))
    (scheme,) = result.config_groups.values()
    assert isinstance(scheme, quant_scheme.QuantizationScheme)
    preset = "FP8_DYNAMIC" if name == "fp8" else f"{name.upper()}A16"
    assert scheme.weights == quant_scheme.preset_name_to_scheme(preset, ["Linear"]).weights
    assert result.format == layout and result.quantization_status == "compressed"


@pytest.mark.slow
def test_classes_of_transformers(rng: np.random.Generator):
    """gpt-oss's and DeepSeek's configurations are what transformers' classes take."""
    pytest.importorskip("transformers")
    from transformers.quantizers.auto import AutoQuantizationConfig

    expected = {
        "gpt-oss": {"quant_method": "mxfp4"},
        "deepseek-v3": {"weight_block_size": [128, 128], "scale_fmt": "float"},
        "deepseek-v3.1": {"scale_fmt": "ue8m0", "expert_dtype": "fp8"},
        "deepseek-v4-experts": {"scale_fmt": "ue8m0", "expert_dtype": "fp4"},
    }
    for layout, fields in expected.items():
        stated = checkpoint.quantization_config(weights_of(named(layout), rng), layout=layout)
        result = AutoQuantizationConfig.from_dict(json.loads(json.dumps(stated)))
        for name, value in fields.items():
            assert getattr(result, name) == value, (layout, name)
        assert "lm_head" in result.modules_to_not_convert


@pytest.mark.slow
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_transformers_loads_what_is_written(format: str, tmp_path: Path):
    """A model in several files, loaded by its config.json alone, has the weights written here."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    model.save_pretrained(tmp_path / "model")
    small, values = tmp_path / "small", tmp_path / "values"
    words = ["quantize", tmp_path / "model", small, "--format", format]
    words += ["--to", "compressed-tensors", "--max-shard-size", "20kB"]
    assert main([str(word) for word in words]) == 0
    assert main(["dequantize", str(small), str(values)]) == 0
    tokens = torch.arange(8)[None]

    def logits(folder: Path) -> Any:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        with torch.no_grad():
            return loaded(tokens).logits

    result, expected = logits(small), logits(values)
    assert torch.equal(result, expected)
    assert not torch.equal(result, logits(tmp_path / "model"))
