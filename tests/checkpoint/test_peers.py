"""Files of ModelOpt, Quark and transformers, by their own code on a CPU, and ours read by it.

They need `pip install nvidia-modelopt amd-quark transformers torch`, of which the first three were
0.47, 0.13 and 5.23 when these tests were written.
"""

import json
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mx_jax import checkpoint
from tests.checkpoint.stored import values

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
UP = "up.weight"


def saved(path: Path, tensors: dict[str, Any]) -> Path:
    import safetensors.torch

    safetensors.torch.save_file({name: x.contiguous() for name, x in tensors.items()}, path)
    return path


def read(path: Path, name: str = UP) -> np.ndarray:
    return values(checkpoint.read(path)[name])


def written(path: Path, layout: str) -> dict[str, Any]:
    """The tensors of a file after reading and writing it, as torch has them."""
    import safetensors.torch

    out = path.with_name("ours.safetensors")
    checkpoint.write(out, checkpoint.read(path), layout=layout)
    return safetensors.torch.load_file(out)


def assert_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Names, dtypes, shapes and bytes."""
    torch = pytest.importorskip("torch")
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (x.dtype, x.shape), name
        one, other = (each.contiguous().reshape(-1).view(torch.uint8) for each in (ours[name], x))
        assert torch.equal(one, other), name


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        ("NVFP4_DEFAULT_CFG", "modelopt-nvfp4"),
        ("MXFP4_DEFAULT_CFG", "modelopt-mxfp4"),
        ("MXFP8_DEFAULT_CFG", "mxfp8-quantized"),
    ],
)
def test_modelopt(config: str, layout: str, tmp_path: Path):
    """A layer quantized and exported by it, with what it says in config.json."""
    torch = pytest.importorskip("torch")
    mtq = pytest.importorskip("modelopt.torch.quantization")
    stating = pytest.importorskip("modelopt.torch.export.convert_hf_config")
    utilities = pytest.importorskip("modelopt.torch.export.quant_utils")
    export = pytest.importorskip("modelopt.torch.export.unified_export_hf")
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"up": torch.nn.Linear(96, 64, bias=False)}).to(torch.bfloat16)
    model["up"].weight.data[3, :32] = 0
    # ModelOpt calibrates no input on a CPU, and weights need none.
    mtq.quantize(model, getattr(mtq, config))
    said = stating.convert_hf_quant_config_format(utilities.get_quant_config(model))
    export._export_quantized_weight(model["up"], torch.bfloat16)
    theirs = utilities.postprocess_state_dict(model.state_dict(), 1.0, None)
    file = saved(tmp_path / "model.safetensors", theirs)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
    weights = checkpoint.read(tmp_path)
    assert weights.quantized == {UP: layout}
    assert_equal(written(file, layout), theirs)

    tensor, scales = theirs[UP], {"scale": theirs["up.weight_scale"]}
    kind, size = qtensor.MXFP4QTensor, 32
    if layout == "mxfp8-quantized":
        kind = qtensor.MXFP8QTensor
    if "up.weight_scale_2" in theirs:
        kind, size = qtensor.NVFP4QTensor, 16
        scales["double_scale"] = theirs["up.weight_scale_2"]
    held = kind(torch.Size((64, 96)), torch.float32, tensor)
    expected = held.dequantize(dtype=torch.float32, block_sizes={-1: size}, **scales)
    np.testing.assert_array_equal(read(tmp_path), expected.float().numpy())


@pytest.mark.parametrize(
    ("layout", "scale_fmt"), [("deepseek-v3", "float"), ("deepseek-v3.1", "ue8m0")]
)
def test_transformers_float8(layout: str, scale_fmt: str, tmp_path: Path):
    """DeepSeek's blocks of 128 x 128, quantized and dequantized by transformers."""
    torch = pytest.importorskip("torch")
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    config = types.SimpleNamespace(weight_block_size=(128, 128), scale_fmt=scale_fmt)
    quantizer = types.SimpleNamespace(quantization_config=config)
    torch.manual_seed(0)
    weight = torch.randn(256, 384) * torch.logspace(-3, 3, 384)
    theirs = fp8.Fp8Quantize(quantizer).convert({UP: weight})
    file = saved(tmp_path / "model.safetensors", theirs)
    stated = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": scale_fmt}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": stated}))
    assert checkpoint.read(tmp_path).quantized == {UP: layout}
    ours = written(file, layout)
    assert_equal(ours, theirs)
    back = fp8.Fp8Dequantize(quantizer)._dequantize_one(
        ours[UP], ours["up.weight_scale_inv"], output_dtype=torch.float32
    )
    np.testing.assert_array_equal(read(tmp_path), back.numpy())


def test_transformers_packed_fp4(tmp_path: Path):
    """DeepSeek-V4's experts, two codes in an I8: every byte, unpacked by transformers."""
    torch = pytest.importorskip("torch")
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    packed = torch.arange(-128, 128, dtype=torch.int8).reshape(8, 32)
    scales = torch.arange(110, 126, dtype=torch.uint8).view(torch.float8_e8m0fnu).reshape(8, 2)
    theirs = {UP: packed, "up.scale": scales}
    file = saved(tmp_path / "model.safetensors", theirs)
    assert checkpoint.read(file).quantized == {UP: "deepseek-v4-experts"}
    ours = written(file, "deepseek-v4-experts")
    assert_equal(ours, theirs)
    back = fp8.Fp8Dequantize(None)._dequantize_one(
        ours[UP], ours["up.scale"], output_dtype=torch.float32
    )
    np.testing.assert_array_equal(read(file), back.numpy())


def test_quark(tmp_path: Path):
    """A small Llama quantized and exported by it; it loads what is written here."""
    torch = pytest.importorskip("torch")
    quark = pytest.importorskip("quark.torch")
    configs = pytest.importorskip("quark.torch.quantization.config.config")
    llama = pytest.importorskip("transformers.models.llama")
    sizes: dict[str, int] = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 32}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = llama.LlamaForCausalLM(llama.LlamaConfig(**sizes)).to(torch.bfloat16)
    spec = configs.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False).to_quantization_spec()
    names = configs.QConfig(
        global_quant_config=configs.QLayerConfig(weight=spec), exclude=["lm_head"]
    )
    model = quark.ModelQuantizer(names).quantize_model(model, None)
    model = quark.ModelQuantizer.freeze(model)
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    quark.export_safetensors(model, str(theirs))
    weights = checkpoint.read(theirs)
    assert set(weights.quantized.values()) == {"modelopt-mxfp4"} and len(weights.quantized) == 7

    import safetensors.torch

    ours.mkdir()
    checkpoint.write(ours / "model.safetensors", weights, layout="modelopt-mxfp4")
    (ours / "config.json").write_bytes((theirs / "config.json").read_bytes())
    one, other = (
        safetensors.torch.load_file(each / "model.safetensors") for each in (ours, theirs)
    )
    assert_equal(one, other)
    loaded = quark.import_model_from_safetensors(
        llama.LlamaForCausalLM(llama.LlamaConfig(**sizes)), str(ours)
    )
    for name in weights.quantized:
        module = loaded.get_submodule(name.removesuffix(".weight"))
        expected = module._get_qweight(module.weight).float().detach().numpy()
        np.testing.assert_array_equal(read(ours, name), expected)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp6", "mxfp8", "nvfp4"])
def test_compressed_tensors(name: str, tmp_path: Path, rng: np.random.Generator):
    """What its compressors write is read here, and they read what is written here: bit for bit."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors")
    import safetensors.torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import quant_scheme

    layout = f"{name}-quantized" if name == "mxfp8" else f"{name}-pack-quantized"
    scheme = quant_scheme.preset_name_to_scheme(f"{name.upper()}A16", ["Linear"])
    compressor = BaseCompressor.get_value_from_registry(layout)
    weight = torch.tensor(rng.standard_normal((8, 64)).astype(np.float32))
    size, largest = {"mxfp4": (32, 6), "mxfp6": (32, 7.5), "mxfp8": (32, 448), "nvfp4": (16, 6)}[
        name
    ]
    amax = weight.reshape(8, -1, size).abs().amax(-1)
    if name == "nvfp4":
        peak = 2688 / weight.abs().max()
        source = {
            "weight": weight,
            "weight_scale": (amax / largest * peak).to(torch.float8_e4m3fn).float(),
            "weight_global_scale": peak.reshape(1),
        }
    else:
        source = {
            "weight": weight,
            "weight_scale": 2 ** torch.floor(torch.log2(amax / largest) + 0.5),
        }
    packed = compressor.compress(source, scheme)
    path = tmp_path / "theirs.safetensors"
    safetensors.torch.save_file({f"up.{k}": v.contiguous() for k, v in packed.items()}, path)
    result = checkpoint.read(path)["up.weight"]
    theirs = compressor.decompress(packed, scheme)["weight"].float().numpy()
    ours = values(result)
    if name == "nvfp4":
        # It divides by the stored number; a factor is its rounded reciprocal.
        np.testing.assert_allclose(ours, theirs, rtol=2.0**-7)
    else:
        np.testing.assert_array_equal(ours, theirs)

    checkpoint.write(tmp_path / "ours.safetensors", {"up.weight": result}, layout=layout)
    again = safetensors.torch.load_file(tmp_path / "ours.safetensors")
    assert again.keys() == {f"up.{k}" for k in packed}
    for key, value in packed.items():
        mine = again[f"up.{key}"]
        assert mine.dtype == value.dtype and mine.shape == value.shape, key
        if key == "weight_global_scale":
            assert abs(float(mine / value) - 1) < 2.0**-22
        else:
            assert torch.equal(mine.view(torch.uint8), value.view(torch.uint8)), key
