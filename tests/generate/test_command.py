"""`python -m mx_jax generate` as it is used: what is printed, kept, compiled and held in memory."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import mx_jax
from mx_jax.cli import main
from mx_jax.generate import decode
from mx_jax.generate import load as loading
from mx_jax.generate.command import keep_programs
from mx_jax.generate.load import DEFAULT, formats_of, load
from mx_jax.generate.model import PRODUCTS
from mx_jax.packed import unpacked
from tests.generate import tiny


@pytest.fixture
def stop() -> list[int]:
    """Tokens that end a text, for a test to add to."""
    return []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: list[int]) -> Path:
    monkeypatch.setattr(loading, "tokenizer_of_folder", lambda folder: tiny.tokenizer(*stop))
    return tiny.put_folder(tmp_path)


def test_the_prompt_from_standard_input_and_the_end_token(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stop: list[int],
):
    words = ["generate", str(folder), "--format", "float32", "--no-cache", "--max-tokens", "3"]
    words += ["--temperature", "1", "--seed", "1"]
    assert main([*words, "--prompt", "Once"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Once") and said.endswith("\n") and len(said) == 4 + 3 + 1
    monkeypatch.setattr("sys.stdin", io.StringIO("Once"))
    assert main([*words, "--prompt", "-"]) == 0
    assert capsys.readouterr().out == said
    # The second of them ends the text.
    assert said[4] != said[5]
    stop.append(ord(said[5]) - 32)
    assert main([*words, "--prompt", "Once"]) == 0
    assert capsys.readouterr().out == said[:5] + "\n"


def test_what_is_said_before_an_interruption_ends_a_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(decode, "advance_many", interrupted)
    words = ["generate", str(folder), "--format", "float32", "--no-cache", "--prompt", "Once"]
    with pytest.raises(KeyboardInterrupt):
        main(words)
    # The first token was there, before the program of the others.
    said = capsys.readouterr().out
    assert len(said) == 6 and said.endswith("\n")


def test_blocks_share_a_program(folder: Path):
    generator, _ = load(folder, weights="float32")
    program: Any = decode._attend_and_feed
    program.clear_cache()
    next(generator.stream([1, 2, 3], 1))
    assert program._cache_size() == 1


def test_the_default_has_a_format_for_each_part(folder: Path):
    generator, _ = load(folder)
    layer = generator.params["layers_1"]
    names = {own: unpacked(layer[own]["kernel"]).format.name for own in PRODUCTS}
    few = dict.fromkeys(("attention_out", "gate_up"), "nvfp4")
    assert names == dict.fromkeys(("qkv", "down"), "mxfp6_e2m3") | few
    assert unpacked(generator.params["embedding"]).format.name == "mxint8"
    names = {part: format.name for part, format in formats_of(DEFAULT).items()}
    for part, format in names.items():
        own = generator.params["embedding"] if part == "head" else layer[part]["kernel"]
        assert unpacked(own).format.name == format


def test_no_twin_in_float32_of_all_weights(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A block's matrices are gone from memory when the next block is read."""
    held: list[int] = []
    read = loading._Counted.__getitem__

    def watched(self: Any, name: str) -> Any:
        arrays = [x for x in jax.live_arrays() if x.dtype == jnp.float32 and x.ndim == 2]
        held.append(sum(x.nbytes for x in arrays))
        return read(self, name)

    monkeypatch.setattr(loading._Counted, "__getitem__", watched)
    load(folder, weights="mxfp6")
    largest = max(x.nbytes for x in tiny.hub_tensors().values())
    assert len(held) == 20 and max(held) - held[0] <= 4 * largest
    held.clear()
    # As they are in float32 they do stay.
    load(folder, weights="float32")
    assert max(held) - held[0] > 4 * largest


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Path]:
    """A folder in which JAX keeps programs, for one test."""
    names = ("dir", "max_size")
    before = {name: getattr(jax.config, f"jax_compilation_cache_{name}") for name in names}
    least = jax.config.jax_persistent_cache_min_compile_time_secs
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path / "programs"
    for name, value in before.items():
        jax.config.update(f"jax_compilation_cache_{name}", value)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
    compilation_cache.reset_cache()
    jax.clear_caches()


def test_programs_of_equal_shapes_and_other_formats_are_kept_apart(programs: Path):
    """Codes of these formats are arrays of the same shapes and dtypes."""
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    w = np.random.default_rng(1).standard_normal((32, 64)).astype(np.float32)
    formats = ("mxfp8_e4m3", "mxint8")

    def run(format: str) -> Any:
        cast = jax.jit(lambda w: mx_jax.quantize(w, format, axis=1))
        pack = jax.jit(mx_jax.pack_weights)
        multiply = jax.jit(lambda x, w: mx_jax.matmul(x, w.T, recipe="high_precision"))
        codes = cast(w)
        return codes.codes, codes.scales, multiply(x, pack(codes))

    expected = {format: jax.tree.map(np.asarray, run(format)) for format in formats}
    assert len({parts[0].tobytes() for parts in expected.values()}) == 2
    assert len({str(jax.tree.map(np.shape, parts)) for parts in expected.values()}) == 1
    hits: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
    keep_programs(programs)
    for again in (False, True):
        jax.clear_caches()
        for format in formats:
            jax.tree.map(np.testing.assert_array_equal, run(format), expected[format])
        kept = len([*programs.glob("*-cache")])
        found = sum("cache_hits" in name for name in hits)
        # Small programs, such as a transpose, may be the same for several formats.
        assert found >= 4 if again else kept >= 4, (found, kept)
        hits.clear()


def test_a_program_that_was_cut_short_goes(programs: Path):
    programs.mkdir(parents=True)
    for name in ("whole-cache", "whole-atime", "cut-cache"):
        (programs / name).write_text("x")
    keep_programs(programs)
    assert {path.name for path in programs.iterdir()} == {"whole-cache", "whole-atime"}


def test_a_folder_that_the_user_gave_is_used(programs: Path, tmp_path: Path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    keep_programs(programs)
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
    assert not programs.exists()
    jax.config.update("jax_compilation_cache_dir", None)
    (tmp_path / "file").touch()
    keep_programs(tmp_path / "file" / "programs")
    assert jax.config.jax_compilation_cache_dir is None
