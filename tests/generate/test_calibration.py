"""Language models calibrated on texts by the commands: GPTQ with what each product reads."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import calibrate, checkpoint, recipes
from mx_jax.cli import main
from mx_jax.generate import load as loading
from mx_jax.generate.config import GGUF, HUB
from mx_jax.generate.load import (
    LENGTH,
    by_tensors,
    load,
    model_moments,
    open_model,
    params_of,
)
from mx_jax.generate.model import Llama
from mx_jax.packed import unpacked
from tests.checkpoint.gguf_bytes import F32, STRING, U32, Tensor, array, gguf, text
from tests.generate import tiny
from tests.generate.test_model import METADATA
from tests.quick import quick

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 7


@pytest.fixture(autouse=True)
def letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "tokenizer_of_folder", lambda folder: tiny.tokenizer())
    monkeypatch.setattr(loading, "tokenizer_of_gguf", lambda fields, where: tiny.tokenizer())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tiny.put_folder(tmp_path / "model")


def error(capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    assert main([str(word) for word in words]) == 2
    return capsys.readouterr().err


def test_a_llama_s_moments_hold_its_head_s(folder: Path):
    """What the last norm gives is what the tied table is multiplied with."""
    source = open_model(folder)
    params: Any = params_of(source.weights, source.config, source.names)
    found = model_moments(params, source.config, tiny.tokenizer(), [folder.parent / "text.txt"])
    parts = ("qkv", "attention_out", "gate_up", "down")
    assert found.keys() == {"embedding"} | {f"layers_{i}/{part}" for i in (0, 1) for part in parts}
    tokens = np.array([tiny.Letters().encode(TEXT[:LENGTH]).ids], np.int32)
    # A head that is one gives back what it is multiplied with.
    config = source.config
    untied = dataclasses.replace(config, tied=False)
    eye = {**params, "head": jnp.eye(config.vocabulary, config.width)}
    apply = quick(Llama(untied, recipes.high_precision()).apply)
    rows = np.asarray(apply({"params": eye}, tokens)[0])[0, :, : config.width]
    np.testing.assert_allclose(found["embedding"], rows.T @ rows, rtol=1e-4, atol=1e-3)
    named = by_tensors(found, HUB, config)
    assert named["model.embed_tokens.weight"] is found["embedding"]
    assert named["model.layers.1.self_attn.k_proj.weight"] is found["layers_1/qkv"]
    assert named["model.layers.0.mlp.down_proj.weight"] is found["layers_0/down"]
    assert set(named) == {name for name, x in tiny.hub_tensors().items() if x.ndim == 2}


def test_quantized_by_gptq(folder: Path, capsys: pytest.CaptureFixture[str]):
    """By the command, a tied head too: the codes of the same in Python."""
    out, said, rules = (folder.parent / name for name in ("small", "text.txt", "rules.toml"))
    name = "model.embed_tokens.weight"
    rules.write_text(
        '[[rule]]\npattern = ".*embed.*"\nformat = "mxfp4"\nscales = "gptq"\n'
        '[[rule]]\npattern = ".*down_proj"\nformat = "mxfp4"\n'
    )
    words = ("quantize", folder, out, "--rules", rules, "--texts", said)
    assert main([str(word) for word in words]) == 0
    told = capsys.readouterr().err
    assert f"1 of 20 tensors by GPTQ, calibrated on {said}" in told
    small: Any = checkpoint.read(out)
    table = tiny.hub_tensors()[name]
    assert len(small.quantized) == 3
    moments = loading.tensor_moments(folder, [said])
    want = calibrate.gptq(table, "mxfp4", moments[name], axis=1)
    np.testing.assert_array_equal(small[name].codes, want.codes)
    assert (want.codes != calibrate.search_scales(table, "mxfp4", axis=1).codes).any()


def test_generate_quantizes_by_the_same_way(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Each matrix by its own moment, found by its path, along the axis that it contracts."""
    asked: dict[str, tuple[int, tuple[int, ...], bool]] = {}

    def way(self: Any, names: Any, w: jax.Array, format: Any, axis: Any, looked_up: bool) -> Any:
        (name,) = names
        k = w.shape[axis]
        assert self.moments[name].shape == (k, k)
        asked[name] = axis % w.ndim, w.shape, looked_up
        return mx_jax.quantize(w, format, axis=axis, scale_rule="even")

    monkeypatch.setattr(calibrate.Gptq, "__call__", way)
    texts = [folder.parent / "text.txt"]
    generator, _ = load(folder, weights="mxfp4", scales="gptq", texts=texts)
    assert asked["embedding"] == (1, (96, 64), True)
    assert asked["layers_1/attention_out"] == (1, (64, 128), False) and len(asked) == 9
    with pytest.warns(UserWarning, match="MXFP4 by rounding of qkv, .*, head: small models repeat"):
        plain, _ = load(folder, weights="mxfp4")
    for one, other in zip(*map(jax.tree.leaves, (generator.params, plain.params)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_cannot_be_calibrated(folder: Path, capsys: pytest.CaptureFixture[str]):
    out, texts = folder.parent / "out", folder.parent / "few.txt"
    texts.write_text("few")
    words = ("quantize", folder, out, "--format", "mxfp4")
    assert "--texts are for GPTQ, and nothing is" in error(capsys, *words, "--texts", texts)
    words += ("--scales", "gptq")
    assert f"a text of {LENGTH} tokens at least, got 3" in error(capsys, *words, "--texts", texts)
    texts.write_bytes(b"\xff\xfe")
    assert "few.txt is no text in UTF-8" in error(capsys, *words, "--texts", texts)
    assert "--scales gptq chooses the scales" in error(capsys, *words, "--scale-rule", "even")
    (folder / "config.json").unlink()
    said = error(capsys, *words)
    assert "there is no config.json" in said and "mx_jax.calibrate.moments in Python" in said
    for options, complaint in (
        ({"weights": "float32", "scales": "gptq"}, "scales=gptq is for weights that are quantized"),
        ({"scales": "mse", "texts": [texts]}, "texts are for scales=gptq, got scales=mse"),
        ({"scales": "best"}, "scales must be mse or gptq, got scales='best'"),
    ):
        (folder / "config.json").write_text(json.dumps(tiny.HUB_CONFIG))
        with pytest.raises(ValueError, match=complaint):
            load(folder, **options)


def fields() -> Iterator[tuple[str, tuple[int, bytes]]]:
    for name, value in METADATA.items():
        if isinstance(value, list):
            yield name, array(STRING, [text(each) for each in value])
        elif isinstance(value, str):
            yield name, (STRING, text(value))
        elif isinstance(value, float):
            yield name, (F32, np.float32(value).tobytes())
        else:
            yield name, (U32, np.uint32(value).tobytes())


def test_from_a_gguf_file_to_a_folder_that_generate_reads(tmp_path: Path):
    """What the file says of the model comes along; its codes are run as they are stored."""
    file, out = tmp_path / "tiny.gguf", tmp_path / "small"
    tensors = {name: Tensor(0, x.shape[::-1], x.tobytes()) for name, x in tiny.tensors().items()}
    file.write_bytes(gguf(tensors, dict(fields())))
    assert main(["quantize", str(file), str(out), "--format", "mxfp4", "--keep", ""]) == 0
    again = tmp_path / "again"
    assert main(["convert", str(out), str(again), "--to", "compressed-tensors"]) == 0
    for path in (out, again):
        source = open_model(path)
        assert source.names is GGUF and source.config == open_model(file).config
        assert source.config == tiny.CONFIG
        generator, _ = load(path)
        assert unpacked(generator.params["embedding"]).format.name == "mxfp4"
        with pytest.warns(UserWarning, match="MXFP4 by rounding"):
            plain, _ = load(file, weights="mxfp4")
        for layer in ("qkv", "down"):
            stored, made = (
                unpacked(each.params["layers_1"][layer]["kernel"]) for each in (generator, plain)
            )
            np.testing.assert_array_equal(stored.dequantize(), made.dequantize())
