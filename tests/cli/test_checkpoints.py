"""`python -m mx_jax quantize`, `dequantize`, `convert` and `inspect` on small files."""

import contextlib
import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import mx_jax
from mx_jax import calibrate, checkpoint
from mx_jax.checkpoint import files
from mx_jax.commands import main, rules, stream
from tests.checkpoint.gguf_bytes import Tensor, gguf
from tests.checkpoint.killed import at_each_change
from tests.checkpoint.stored import assert_same, assert_same_tensors
from tests.cli.conftest import Cli

UP, HEAD, NORM = "model.layers.0.up.weight", "lm_head.weight", "model.norm.weight"


def matrix(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((8, 64), np.float32)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A matrix, a head, a vector, and integers that a JAX array would not hold."""
    path = tmp_path / "model.safetensors"
    tensors = {UP: matrix(), HEAD: matrix(1), NORM: np.ones(64, np.float32)}
    safetensors.numpy.save_file(tensors | {"ids": np.array([[1 << 40, 2]])}, path)
    return path


def values(path: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(path)


def words_of(command: str, out: Path) -> list[Any]:
    """What a command takes after the file that it reads."""
    words = {"quantize": [out, "--format", "mxfp4"], "convert": [out, "--to", "mx_jax"]}
    return (words | {"dequantize": [out], "inspect": []})[command]


# quantize -----------------------------------------------------------------------------------------


def test_quantize_keeps_the_head_and_the_bits(model: Path, out: Path, cli: Cli):
    _, said = cli("quantize", model, out, "--format", "mxfp4")
    assert "1 of 4 tensors quantized, " in said
    result = checkpoint.read(out)
    assert result.quantized == {UP: "mx_jax"}
    assert_same(result[UP], mx_jax.quantize(matrix(), "mxfp4", scale_rule="even"))
    # Of 8 rows of 64: half a byte a code, and a scale for 32.
    assert result.stored[UP].nbytes == 8 * (32 + 2)
    stayed = values(out)
    assert stayed["ids"].tolist() == [[1 << 40, 2]]
    np.testing.assert_array_equal(stayed[HEAD], matrix(1))


def test_rules_decide_in_order(model: Path, out: Path, rules: Any, cli: Cli):
    layers = {"format": "mxfp8_e4m3", "scale_rule": "floor", "axis": 0}
    head = {"pattern": "lm_head.weight", "recipe": "nvfp4"}
    rest = {"pattern": ".*", "skip": True}
    decided = rules("", {"pattern": "model/layers/.*"} | layers, head, rest)
    cli("quantize", model, out, "--rules", decided)
    result: Any = checkpoint.read(out)
    assert result[HEAD].format.name == "nvfp4"
    assert_same(result[UP], mx_jax.quantize(matrix(), "mxfp8_e4m3", axis=0))


def test_scales_by_squared_error(model: Path, out: Path, rules: Any, cli: Cli):
    cli("quantize", model, out, "--format", "nvfp4", "--scales", "mse")
    assert_same(checkpoint.read(out)[UP], calibrate.search_scales(matrix(), "nvfp4", axis=-1))
    up = rules("", {"pattern": ".*up", "format": "mxfp4", "scales": "mse"})
    cli("quantize", model, out, "--rules", up, "--force")
    assert_same(checkpoint.read(out)[UP], calibrate.search_scales(matrix(), "mxfp4", axis=-1))
    words = ("quantize", model, out, "--force", "--scales", "mse")
    said = cli.error(*words, "--format", "mxfp4", "--scale-rule", "even")
    assert "--scales mse chooses the scales" in said
    assert "takes scales in E8M0" in cli.error(*words, "--format", "float8_rowwise_e4m3")


def test_several_files(model: Path, tmp_path: Path, cli: Cli):
    out = tmp_path / "folder"
    words = ("quantize", model, out, "--format", "mxfp4", "--max-shard-size", "1KB")
    theirs = ("--to", "compressed-tensors", "--force")
    for layout, more in (("mx_jax", ()), ("mxfp4-pack-quantized", theirs)):
        _, said = cli(*words, *more)
        assert len([*out.glob("*.safetensors")]) > 1 and "1 of 4 tensors quantized" in said
        assert checkpoint.read(out).quantized == {UP: layout}
    assert "is there already" in cli.error(*words, *theirs[:2])
    # One file takes the place of them all; what else the folder holds stays.
    (out / "notes.md").write_text("mine")
    cli(*words[:-2], "--force")
    assert sorted(path.name for path in out.iterdir()) == ["model.safetensors", "notes.md"]


def test_a_dry_run_says_why_and_writes_nothing(model: Path, out: Path, cli: Cli):
    text, _ = cli("quantize", model, out, "--format", "mxfp4", "--dry-run")
    assert "weight_only(mxfp4)" in text and "kept by its rule" in text
    assert "is int64; float32" in text and "1 of 3 layers converted" in text
    assert not out.exists()


def test_experts_need_an_axis_and_have_a_tensor_scale_each(
    tmp_path: Path, out: Path, rules: Any, cli: Cli
):
    path = tmp_path / "a.safetensors"
    experts = np.stack([matrix(), 8 * matrix(1)])
    safetensors.numpy.save_file({"experts.up.weight": experts}, path)
    text, _ = cli("quantize", path, out, "--format", "nvfp4", "--dry-run")
    assert "give its rule an axis" in text
    last = rules("", {"pattern": ".*", "format": "nvfp4", "axis": -1})
    cli("quantize", path, out, "--rules", last)
    result = checkpoint.load(out)["experts.up.weight"]
    for index in range(2):
        expected = mx_jax.quantize(experts[index], "nvfp4")
        np.testing.assert_array_equal(result.codes[index], expected.codes)
        assert float(result.tensor_scale[index, 0, 0]) == float(expected.tensor_scale[0, 0])
    squares = rules("", {"pattern": ".*", "format": "mxfp4_2d", "axis": -1})
    cli("quantize", path, out, "--rules", squares, "--force")
    assert checkpoint.load(out)["experts.up.weight"].blocks == ((-2, 32), (-1, 32))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("rule = 3", r"must consist of [[rule]] tables"),
        ("[[rule", "is no TOML"),
        ({"format": "mxfp4"}, "rule 0: needs a pattern"),
        ({"pattern": "*", "skip": True}, "rule 0: Rule: pattern must be"),
        ({"pattern": "a", "format": "mxfp5"}, "rule 0: unknown block format"),
        ({"pattern": "a", "recipe": "mxfp5"}, "rule 0: Rule 'a': unknown recipe"),
        ({"pattern": "a", "skip": True, "format": "mxfp4"}, "rule 0: needs exactly one of"),
        ({"pattern": "a", "skip": True, "axes": 1}, "got pattern, skip, axes"),
        ({"pattern": "a", "format": "mxfp4", "axis": "1"}, "axis must be an integer"),
        (
            {"pattern": ".*", "format": "mxfp4", "axis": 7},
            "axis=7, which lm_head.weight of shape=[8, 64] has not",
        ),
    ],
)
def test_rules_that_are_none(
    text: Any, complaint: str, model: Path, out: Path, rules: Any, cli: Cli
):
    file = rules(text) if isinstance(text, str) else rules("", text)
    said = cli.error("quantize", model, out, "--rules", file, "--strict")
    assert "rules: " in said and complaint in said and not out.exists()


def test_a_pattern_is_of_a_layer():
    """Without what its matrix is called; another tensor of the layer has a name of its own."""
    rule = (rules.format_rule("up", "mxfp4", axis=-1),)
    tensor = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    names = ("up", "up.weight", "up/kernel", "up.lora_a", "up/weight.lora_a")
    result = [name for name in names if rules.judge(rule, name, tensor).quantizes]
    assert result == ["up", "up.weight", "up/kernel"]


def test_a_rule_that_matches_nothing(model: Path, out: Path, rules: Any, cli: Cli):
    nowhere = rules("", {"pattern": "nowhere", "format": "mxfp4"})
    words = ("quantize", model, out, "--rules", nowhere)
    assert "rule 0 ('nowhere') decides about no tensor" in cli.error(*words, "--strict")
    assert not out.exists()
    _, said = cli(*words)
    assert "rule 0 ('nowhere') decides about no tensor" in said and "0 of 4" in said


# dequantize and convert ---------------------------------------------------------------------------


def test_there_and_back_through_a_layout(model: Path, tmp_path: Path, cli: Cli):
    ours, theirs, again, plain = (tmp_path / f"{name}.safetensors" for name in "abcd")
    cli("quantize", model, ours, "--format", "mxfp4")
    _, said = cli("convert", ours, theirs, "--to", "compressed-tensors")
    assert f"{theirs}: mxfp4-pack-quantized, 4 tensors" in said
    assert {"model.layers.0.up.weight_packed", "model.layers.0.up.weight_scale"} < {*values(theirs)}
    cli("convert", theirs, again, "--to", "mx_jax")
    assert_same_tensors(ours, again)
    cli("dequantize", ours, plain, "--dtype", "float32")
    expected = mx_jax.quantize(matrix(), "mxfp4", scale_rule="even").dequantize()
    np.testing.assert_array_equal(values(plain)[UP], np.asarray(expected))


def test_a_program_without_a_layout_for_the_format(model: Path, out: Path, cli: Cli):
    words = ("quantize", model, out, "--format", "mxint8", "--to", "modelopt")
    said = cli.error(*words)
    assert f"modelopt has no one layout for mxint8 ({UP})" in said and "modelopt-nvfp4" in said
    assert "unknown layout='nowhere'" in cli.error(*words[:-1], "nowhere")
    assert not out.exists()


def test_a_tree_stays_a_tree(tmp_path: Path, out: Path, cli: Cli):
    path = tmp_path / "tree.safetensors"
    tree = {"layers": {0: {"kernel": jnp.asarray(matrix().T)}, 1: {}}}
    checkpoint.save(path, tree)
    cli("quantize", path, out, "--format", "mxfp4")
    assert checkpoint.load(out)["layers"][1] == {}
    kernel = checkpoint.load(out)["layers"][0]["kernel"]
    # A kernel is [in, out].
    assert kernel.format.name == "mxfp4" and kernel.blocks == ((-2, 32),)
    cli("dequantize", out, path, "--force")
    assert checkpoint.load(path)["layers"][0]["kernel"].shape == (64, 8)


def test_gguf_of_values_that_only_ggml_stores(tmp_path: Path, out: Path, cli: Cli):
    """What no MXArray holds is float32, and that is said; llama.cpp's package reads Q6_K."""
    pytest.importorskip("gguf")
    path = tmp_path / "m.gguf"
    signed = np.float16(0.5).tobytes() + bytes(range(32))
    tensors = {"token_embd.weight": Tensor(14, (256, 2), bytes(range(210)) * 2)}
    path.write_bytes(gguf(tensors | {"up.weight": Tensor(8, (32, 2), signed * 2)}))
    rows = {row["name"]: row for row in cli.json("inspect", path)["tensors"]}
    assert {row["stored"] for row in rows.values()} == {"gguf-q6_k", "gguf-q8_0"}
    assert rows["up.weight"]["amax"] == 15.5 and rows["token_embd.weight"]["amax"] > 0
    _, said = cli("quantize", path, out, "--format", "mxfp4")
    assert "1 tensors of gguf-q6_k, which is read only, become float32" in said
    values = np.asarray(checkpoint.load(out)["token_embd.weight"])
    np.testing.assert_array_equal(values, checkpoint.read(path)["token_embd.weight"])
    cli("quantize", path, out, "--format", "mxfp4", "--keep", "", "--force")
    assert checkpoint.load(out)["token_embd.weight"].format.name == "mxfp4"


def test_numbers_of_gguf_stay_what_they_are(tmp_path: Path, out: Path, cli: Cli):
    """In 64 bits, which JAX as it is set does not hold."""
    path = tmp_path / "m.gguf"
    floats, integers = np.array([0.1, 1e300]), np.array([2**53 + 1, 7])
    tensors = {"f": Tensor(28, (2,), floats.tobytes()), "i": Tensor(27, (2,), integers.tobytes())}
    path.write_bytes(gguf(tensors))
    for command in (["convert", "--to", "mx_jax"], ["dequantize"]):
        cli(command[0], path, out, *command[1:], "--force")
        result = values(out)
        assert result["f"].tolist() == floats.tolist() and result["f"].dtype == np.float64
        assert result["i"].tolist() == integers.tolist() and result["i"].dtype == np.int64
        assert_same_tensors(path, out)
    assert cli.json("inspect", path)["tensors"][0]["amax"] == 1e300
    with pytest.raises(
        ValueError, match=r"f: has float64 values from 0.1 up to 1e\+300, which jax"
    ):
        checkpoint.read(path)["f"]


def test_values_above_the_largest_of_a_dtype_are_counted(tmp_path: Path, out: Path, cli: Cli):
    path = tmp_path / "a.safetensors"
    rows = np.full((4, 64), 2.0, np.float32)
    rows[1, :2] = 1e5, -1e5
    checkpoint.save(path, {"up": mx_jax.quantize(rows, "mxfp8_e5m2"), "gate": jnp.ones((4, 64))})
    words = ("dequantize", path, out, "--dtype", "float16")
    said = cli.error(*words)
    assert "up holds 2 of 256 values beyond 65504, the largest of float16" in said
    assert not out.exists()
    _, said = cli(*words, "--inexact")
    assert "2 values of 1 tensors, such as up, became inf" in said
    assert np.isinf(values(out)["up"]).sum() == 2
    _, said = cli("dequantize", path, out, "--dtype", "bfloat16", "--force")
    assert "became inf" not in said
    # float32 has a largest value as well.
    big = dataclasses.replace(checkpoint.load(path)["up"], scales=jnp.full((4, 2), 254, jnp.uint8))
    checkpoint.save(path, {"up": big})
    assert "beyond 3.40282e+38" in cli.error("dequantize", path, out, "--force")


@pytest.mark.parametrize("command", ["quantize", "dequantize", "convert", "inspect"])
def test_models_that_others_quantized(command: str, tmp_path: Path, out: Path, cli: Cli):
    """What nothing here reads is no plain model, whose `quantization_config` could go."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    safetensors.numpy.save_file({"up.qweight": np.ones((8, 8), np.int32)}, folder / files.WHOLE)
    more = words_of(command, out)
    for key in ("quantization_config", "compression_config"):
        for method in ("gptq", "awq", "bitsandbytes"):
            (folder / "config.json").write_text(json.dumps({key: {"quant_method": method}}))
            said = cli.error(command, folder, *more)
            assert f"{folder}: config.json says quant_method={method!r}, which" in said
    assert not out.exists()


# inspect ---------------------------------------------------------------------------------


def test_inspect_tells_what_a_divisor_multiplies_by(tmp_path: Path, cli: Cli):
    """float8's stored scales divide: 448 / 7 = 64 is a factor of 2^-6."""
    path = tmp_path / "a.safetensors"
    rows = np.array([[7.0] * 8, [0.875] * 8], np.float32)
    checkpoint.save(path, {"up": mx_jax.quantize(rows, "float8_rowwise_e4m3", axis=1)})
    assert cli.json("inspect", path)["tensors"][0]["scales"] == {"-6": 1, "-9": 1}


def test_inspect(tmp_path: Path, cli: Cli):
    exact = np.zeros((2, 64), np.float32)
    exact[0, :3], exact[1, 32], exact[1, 40] = (1, 4, 6.5), 0.3, np.nan
    whole, path = tmp_path / "w.safetensors", tmp_path / "a.safetensors"
    safetensors.numpy.save_file({"<up>.weight": np.nan_to_num(exact)}, whole)
    stored = mx_jax.quantize(np.nan_to_num(exact), "mxfp4")
    checkpoint.save(path, {"<up>.weight": stored, "norm": jnp.asarray(exact[1])})
    words = ("inspect", path, "--reference", whole)
    up, norm = cli.json(*words)["tensors"]
    # amax 6.5 and 0.3 get the scales 1 and 2^-4, blocks of zeros the smallest.
    assert up["scales"] == {"-127": 2, "-4": 1, "0": 1}
    assert up["format"] == "mxfp4" and up["stored"] == "mx_jax" and up["bits"] == 4.25
    assert up["amax"] == 6.0 and up["zeros"] == 124 / 128 and up["saturated"] == 1 / 128
    assert up["sqnr_db"] == pytest.approx(mx_jax.inspect.sqnr_db(np.nan_to_num(exact), stored))
    assert norm["not_finite"] == 1 and norm["scales"] is None
    assert norm["amax"] == pytest.approx(0.3) and norm["format"] == "float32"
    assert up["warnings"][-1].endswith("are zero") and "NaN or infinite" in str(norm["warnings"])
    table, _ = cli(*words)
    assert f"norm: {norm['warnings'][0]}" in table
    table, _ = cli(*words, "--only", ".*up.*")
    assert "2^-127 .. 2^0" in table and "1 tensors" in table and "norm" not in table
    assert "matches none of the 2 tensors" in cli.error(*words, "--only", "x")
    safetensors.numpy.save_file({"<up>.weight": exact[:1]}, whole)
    said = cli.error(*words)
    assert "<up>.weight" in said and "shapes must agree" in said
    for pattern in ("*", "a{99999999999999999999}"):
        assert "no regular expression" in cli.error(*words, "--only", pattern)


# Files that are not right -------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["quantize", "dequantize", "convert", "inspect"])
def test_files_that_are_damaged(command: str, model: Path, tmp_path: Path, out: Path, cli: Cli):
    bad = tmp_path / "bad.safetensors"
    more = words_of(command, out)
    assert str(bad) in cli.error(command, bad, *more)
    bad.write_bytes(model.read_bytes()[:-8])
    assert str(bad) in cli.error(command, bad, *more)
    # NaN in a scale of a layout of others.
    scales = np.array([[127, 255]] * 8, np.uint8)
    tensors = {"up.weight_packed": np.zeros((8, 32), np.uint8), "up.weight_scale": scales}
    safetensors.numpy.save_file(tensors, bad)
    said = cli.error(command, bad, *more)
    assert str(bad) in said and "up.weight" in said and "8 of 16 scales are NaN" in said
    assert not out.exists() and [*tmp_path.glob(".*")] == []


def test_an_output_that_is_there(model: Path, tmp_path: Path, cli: Cli):
    words = ("quantize", model, model, "--format", "mxfp4")
    before = model.read_bytes()
    for same in (model, model.parent / ".." / model.parent.name / model.name, model.parent):
        said = cli.error("quantize", model, same, "--format", "mxfp4", "--force")
        assert "is what is read; write to another place" in said
    linked, folder = tmp_path / "linked.safetensors", tmp_path / "folder"
    folder.mkdir()
    linked.symlink_to(model)
    os.link(model, folder / "model.safetensors")
    # By a link, and in a folder.
    for words_of_one in (
        ("quantize", linked, folder, "--format", "mxfp4", "--force"),
        ("convert", folder, linked, "--to", "mx_jax", "--force"),
    ):
        assert "is what is read; write to another place" in cli.error(*words_of_one)
    assert model.read_bytes() == before
    (folder / "model.safetensors").rename(folder / "adapter.safetensors")
    linked.unlink()
    safetensors.numpy.save_file({UP: matrix()}, linked)
    said = cli.error("quantize", linked, folder, "--format", "mxfp4", "--force")
    assert f"{folder} holds other tensors, in adapter.safetensors" in said
    out = tmp_path / "other.safetensors"
    cli("quantize", model, out, "--format", "mxfp4")
    words = ("quantize", model, out, "--format", "mxfp8")
    assert f"{out} is there already; replace it with --force" in cli.error(*words)
    assert checkpoint.read(out).quantized == {UP: "mx_jax"}
    cli(*words, "--force")
    assert "must be a file or a folder in a folder" in cli.error(
        "dequantize", model, tmp_path / "none" / "out.safetensors"
    )
    assert "needs --format" in cli.error("quantize", model, tmp_path / "o.safetensors")


@pytest.mark.parametrize("options", [(), ("--max-shard-size", "1kB")], ids=["one file", "several"])
def test_a_folder_is_replaced_whole_or_not(
    options: tuple[str, ...], model: Path, tmp_path: Path, cli: Cli
):
    """Stopped before and after every file operation: tensors and config.json are of one run."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "model.safetensors").write_bytes(model.read_bytes())
    (source / "config.json").write_text('{"hidden_size": 64}')
    (source / "tokenizer.txt").write_text("words")
    before, out = tmp_path / "before", tmp_path / "out"
    words = ("--to", "compressed-tensors", *options)
    cli("quantize", source, before, "--format", "mxfp4", *words)
    (before / "notes.md").write_text("mine")
    again = ["quantize", str(source), str(out), "--format", "nvfp4", *words, "--force"]

    def prepare() -> None:
        shutil.rmtree(out, ignore_errors=True)
        for left in tmp_path.glob(".*"):
            shutil.rmtree(left)
        shutil.copytree(before, out)

    def check(last: str, _: int) -> None:
        (layout,) = set(checkpoint.read(out).quantized.values())
        config = json.loads((out / "config.json").read_text())
        assert config["quantization_config"]["format"] == layout, last
        assert (out / "notes.md").read_text() == "mine"
        assert (out / "tokenizer.txt").read_text() == "words"
        assert last or layout == "nvfp4-pack-quantized"
        # What a killed run leaves is no hindrance: some of them are run again.
        if last.startswith("before replace"):
            main(again)

    at_each_change(prepare, lambda: main(again), check)


def test_a_dot_in_the_name_of_a_folder(model: Path, tmp_path: Path, cli: Cli, capsys: Any):
    out = tmp_path / "Llama-3.2-1B-mxfp4"
    cli("quantize", model, out, "--format", "mxfp4")
    assert checkpoint.read(out).quantized == {UP: "mx_jax"}
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    with pytest.raises(SystemExit):
        main(["quantize", str(model), f"{out}.safetensors/", "--format", "mxfp4"])
    assert "ends as a file, .safetensors, and as a folder, /" in capsys.readouterr().err


def test_a_folder_by_a_link_and_by_a_dot(
    model: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
):
    """What a link names is replaced, and the link stays; what config.json said of tensors goes."""
    out, link = tmp_path / "out", tmp_path / "link"
    out.mkdir()
    said = {"hidden_size": 64, "quantization_config": {"quant_method": "fp8"}}
    (out / "config.json").write_text(json.dumps(said))
    (out / "gguf.json").write_text("{}")
    link.symlink_to(out)
    assert "is there already" in cli.error("quantize", model, link, "--format", "mxfp4")
    cli("quantize", model, link, "--format", "mxfp4", "--force")
    assert link.is_symlink() and checkpoint.read(link).quantized == {UP: "mx_jax"}
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors"}
    assert json.loads((out / "config.json").read_text()) == {"hidden_size": 64}
    # Where folders cannot be exchanged, they are moved one after the other.
    with monkeypatch.context() as patch:
        patch.delattr(stream.ctypes, "CDLL")
        cli("quantize", model, link, "--format", "mxfp8_e4m3", "--force")
    assert "mxfp8_e4m3" in str(checkpoint.read(out)[UP]) and (out / "config.json").is_file()
    assert [*tmp_path.glob(".*")] == []
    # A shell would be left in a folder that is gone; a mounted one cannot be moved.
    monkeypatch.chdir(out)
    said = cli.error("quantize", model, ".", "--format", "mxfp4", "--force")
    assert ". is a mount point or the folder that you are in" in said
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os.path, "ismount", lambda path: path == out)
    said = cli.error("quantize", model, out, "--format", "mxfp4", "--force")
    assert f"{out} is a mount point" in said


def test_a_disk_that_is_full_leaves_no_half_tokenizer(
    model: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    model.rename(source / "model.safetensors")
    (source / "tokenizer.json").write_text("{}")
    replacing = files.replacing

    @contextlib.contextmanager
    def full(path: Path) -> Iterator[Any]:
        with replacing(path) as file:
            yield file
            if path.name == "tokenizer.json":
                raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "replacing", full)
    said = cli.error("quantize", source, out, "--format", "mxfp4")
    assert "No space left on device: '" in said and "tokenizer.json" in said
    assert [*tmp_path.iterdir()] == [source]
