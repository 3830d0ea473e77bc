"""What a file says of itself is printed as it is, and what no file should say is refused."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from tests.checkpoint.gguf_bytes import Tensor, gguf
from tests.cli.conftest import Cli


def bare(path: Path, name: str, shape: tuple[int, ...], nbytes: int) -> Path:
    """A file of one tensor of zeros."""
    facts = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, nbytes]}}
    header = json.dumps(facts).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(nbytes))
    return path


def test_brackets_in_names(tmp_path: Path, cli: Cli):
    """They are no markup: neither an error, nor a colour, nor gone."""
    path = bare(tmp_path / "a.safetensors", "[/red][bold]x.weight", (1, 32), 128)
    for words in (["inspect"], ["quantize", "b", "--format", "mxfp4"]):
        command, *rest = words
        more = ["--dry-run"] if command == "quantize" else []
        assert "[/red][bold]x" in cli(command, path, *rest, *more)[0]


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_control_characters_in_names(kind: str, tmp_path: Path, cli: Cli):
    path = tmp_path / f"a.{kind}"
    name = "\x1b[2Jx.weight"
    if kind == "gguf":
        path.write_bytes(gguf({name: Tensor(0, (4,), bytes(16))}))
    else:
        bare(path, name, (1, 1), 4)
    said = cli.error("inspect", path)
    assert str(path) in said and r"a tensor is called '\x1b[2Jx.weight'" in said
    assert "\x1b" not in said


@pytest.mark.parametrize("command", ["inspect", "quantize", "dequantize"])
@pytest.mark.parametrize("shape", [(2**62, 0), (1,) * 65])
def test_a_shape_that_no_array_has(command: str, shape: tuple[int, ...], tmp_path: Path, cli: Cli):
    path = bare(tmp_path / "a.safetensors", "a.weight", shape, 4 * math.prod(shape))
    more = [] if command == "inspect" else [str(tmp_path / "b.safetensors")]
    more += ["--format", "mxfp4"] if command == "quantize" else []
    said = cli.error(command, path, *more)
    assert f"{path}: a.weight has shape={shape}, which is damaged" in said


def test_values_that_are_not_finite_are_counted(tmp_path: Path, cli: Cli):
    path, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    weight = np.ones((4, 64), np.float32)
    tensors = {"good.weight": weight.copy(), "bad.weight": weight}
    weight[1, 40], weight[3, 0] = np.nan, np.inf
    safetensors.numpy.save_file(tensors, path)
    _, said = cli("quantize", path, out, "--format", "mxfp4")
    assert f"{path}: 1 tensors hold NaN or infinite values, which makes whole blocks NaN: " in said
    assert "2 of bad.weight" in said
    others = tmp_path / "c.safetensors"
    words = ("quantize", path, others, "--format", "mxfp4", "--to", "compressed-tensors")
    said = cli.error(*words)
    assert f"{path}: bad.weight holds NaN or infinite values, which makes 2 blocks NaN" in said
    assert not others.exists() and list(tmp_path.glob(".c*")) == []
