"""Words that commands refuse before they read or write, and streams that are closed."""

import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from mx_jax import checkpoint, recipes
from mx_jax.cli import main
from mx_jax.generate.decode import Generator
from mx_jax.generate.load import load
from mx_jax.generate.model import Llama
from tests.generate import tiny

ROOT = Path(__file__).parents[2]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    checkpoint.save(path, {"up": np.ones((8, 64), np.float32)})
    return path


@pytest.mark.parametrize("size", ["much", "0", "0.0001kB"])
def test_a_size_of_files_that_is_none(size: str, file: Path, capsys: pytest.CaptureFixture[str]):
    out = file.with_name("out")
    words = ["quantize", str(file), str(out), "--format", "mxfp4", "--max-shard-size", size]
    assert main(words) == 2
    assert f"--max-shard-size needs a size as 5GB, got {size!r}" in capsys.readouterr().err
    # Else the same with a size would be refused: OUT is there already.
    assert not out.exists()


def test_fewer_tokens_than_none():
    model = Llama(tiny.CONFIG, recipes.high_precision(), jnp.float32)
    generator = Generator(model=model, params={})
    assert [*generator.stream([1], 0)] == []
    with pytest.raises(ValueError, match="max_tokens must be at least 0, got -3"):
        generator.stream([1], -3)


def test_a_format_that_a_cache_cannot_have(tmp_path: Path):
    with pytest.raises(ValueError, match="blocks must lie along the features of one token"):
        load(tmp_path / "none", cache="float8_tensorwise_e4m3")


@pytest.mark.parametrize("closed", [">&-", "2>&- >&-"])
@pytest.mark.slow
def test_closed_streams_are_no_error(closed: str, file: Path):
    """A daemon's: Python has None in their place."""
    words = f"{sys.executable} -m mx_jax inspect {file} {closed}"
    result = subprocess.run(words, shell=True, cwd=ROOT, capture_output=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")
