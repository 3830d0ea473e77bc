"""Words and files that commands refuse before they write, and streams that are closed."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from mx_jax import checkpoint
from mx_jax.commands import main
from mx_jax.commands.output import print_table
from tests.checkpoint.gguf_bytes import Tensor, gguf
from tests.cli.conftest import Cli
from tests.processes import ROOT, run_python


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    checkpoint.save(path, {"up": {"kernel": np.ones((64, 8), np.float32)}})
    return path


@pytest.mark.parametrize("size", ["much", "0", "0.0001kB", 400 * "9"])
def test_a_size_of_files_that_is_none(size: str, file: Path, cli: Cli):
    out = file.with_name("out")
    said = cli.error("quantize", file, out, "--format", "mxfp4", "--max-shard-size", size)
    assert f"--max-shard-size needs a size as 5GB, got {size!r}" in said
    # Else the same with a size would be refused: OUT is there already.
    assert not out.exists()


def test_closed_streams_are_no_error(file: Path, monkeypatch: pytest.MonkeyPatch):
    """A daemon's: Python has None in their place."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert main(["inspect", str(file)]) == 0
    sys.stdout.close()
    sys.stderr.close()


# Without JAX: what the program does around a command, which a stand-in has the place of.
STOPPED = """
import importlib.util, os, signal, sys, time
from types import ModuleType

cli = sys.modules["mx_jax.commands"] = ModuleType("cli")
sys.modules["mx_jax"] = ModuleType("mx_jax")
spec = importlib.util.spec_from_file_location("program", "mx_jax/__main__.py")
program = importlib.util.module_from_spec(spec)
spec.loader.exec_module(program)

# Ignored, if who runs the tests ignores it, as shells have commands in the background do.
signal.signal(signal.SIGINT, signal.default_int_handler)

def run():
    os.kill(os.getpid(), signal.{name})
    signal.pause()

cli.main = run
sys.exit(program._run())
"""


@pytest.mark.parametrize(
    ("name", "status", "said"), [("SIGINT", 130, "mx_jax: interrupted\n"), ("SIGTERM", 143, "")]
)
def test_a_stopped_command_says_one_line_at_most(name: str, status: int, said: str):
    result = run_python("-c", STOPPED.format(name=name))
    assert (result.returncode, result.stderr) == (status, said)


def test_an_interruption_while_modules_load(tmp_path: Path):
    """Whatever loads may catch what Ctrl-C raises; so nothing is raised."""
    catches = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    sum(range(1000))
except BaseException:
    pass
raise SystemExit(7)
"""
    (tmp_path / "ml_dtypes.py").write_text(catches)
    start = "import signal, runpy, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    start += "sys.orig_argv = ['python', '-m', 'mx_jax', 'formats']; sys.argv = ['-m', 'formats']; "
    start += "runpy.run_module('mx_jax', run_name='__main__')"
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = run_python("-c", start, PYTHONPATH=path)
    assert (done.returncode, done.stderr) == (130, "mx_jax: interrupted\n")


def test_a_reader_that_has_gone(file: Path):
    """As `head` leaves: nothing is said of it."""
    for more in ([], ["--json"]):
        reading, writing = os.pipe()
        os.close(reading)
        result = subprocess.run(
            [sys.executable, "-m", "mx_jax", "inspect", file, *more],
            stdout=writing,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": ""},
            check=False,
        )
        os.close(writing)
        assert (result.returncode, result.stderr) == (1, b"")


@pytest.mark.parametrize("place", [1, -1])
def test_a_value_of_two_dashes(
    place: int, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """argparse would take it away, and find no value; after -- all words are files."""
    words = ["quantize", str(file), str(file.with_name("out")), "--format", "mxfp4"]
    words.insert(place, "--scale-rule=--")
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "argument --scale-rule: expected a value, got --" in capsys.readouterr().err
    monkeypatch.chdir(file.parent)
    assert main(["inspect", "--", "--a=--"]) == 2
    assert "no file at --a=--" in capsys.readouterr().err


def test_a_device_is_not_replaced(file: Path, cli: Cli):
    """A pipe here: a test that fails would leave the machine without the device."""
    pipe = file.with_name("pipe.safetensors")
    os.mkfifo(pipe)
    words = ("quantize", file, pipe, "--format", "mxfp4", "--force")
    assert f"{pipe} is a device or a pipe" in cli.error(*words)
    assert pipe.is_fifo()


def test_a_platform_that_is_not_there(file: Path):
    words = ("quantize", file, file.with_name("out"), "--format", "mxfp4")
    done = run_python("-m", "mx_jax", *words, JAX_PLATFORMS="cuda")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("mx_jax: JAX finds no device for JAX_PLATFORMS=cuda: ")


def test_a_dry_run_refuses_what_the_run_refuses(file: Path, cli: Cli):
    out, broken = file.with_name("out.safetensors"), file.with_name("nan.safetensors")
    out.write_text("there")
    checkpoint.save(broken, {"up.weight": np.full((8, 64), np.nan, np.float32)})
    force = ["--force"]
    options = (
        [],
        [*force, "--max-shard-size", "0"],
        [*force, "--moments", file],
        [*force, "--scales", "gptq"],
        [*force, "--scales", "gptq", "--moments", file.with_name("none")],
    )
    for more in options:
        words = ("quantize", file, out, "--format", "mxfp4", "--keep", "", *more)
        assert cli.error(*words, "--dry-run") == cli.error(*words)
    assert "is there already" in cli.error("convert", file, out, "--to", "mx_jax", "--dry-run")
    words = ("quantize", broken, out, "--format", "nvfp4", "--to", "modelopt", "--keep", "", *force)
    said = cli.error(*words)
    assert cli.error(*words, "--dry-run") == said and "makes 32 blocks NaN" in said
    assert out.read_text() == "there"
    odd = file.with_name("odd.safetensors")  # rows of no whole bytes in FP4
    checkpoint.write(odd, {"up.weight": np.ones((8, 33), np.float32)}, layout="torchao")
    for to in ("compressed-tensors", "torchao", "mxfp4-pack-quantized", "none"):
        words = ("quantize", odd, out, "--format", "mxfp4", "--to", to, *force)
        said = cli.error(*words)
        assert cli.error(*words, "--dry-run") == said
        assert to == "none" or ("up.weight" in said and "by --keep or a rule with skip" in said)


def test_a_table_that_is_wider_than_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Names go on below themselves, and numbers stay whole."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "50")
    name = f"model.layers.0.{'x' * 30}.weight"
    columns, row = ("tensor", "format", "bits", "SQNR dB"), (name, "float32", "32", "18.5")
    print_table(columns, [row], left=columns[:2], title="1 tensors")
    first, *others = [
        line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line
    ]
    assert [cell.strip() for cell in first[2:5]] == ["float32", "32", "18.5"]
    assert others and "".join(line[1].strip() for line in (first, *others)) == name
    # Through a pipe tables are as wide as they have to be.
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    print_table(columns, [(name * 5, *row[1:])], left=columns[:2])
    assert f"│ {name * 5} │ float32 │" in capsys.readouterr().out


# What a file says of itself is printed as it is, and what no file should say is refused.


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
