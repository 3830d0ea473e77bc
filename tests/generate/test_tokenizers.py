"""Tokenizers of damaged files: refused by the file's path and the field."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mx_jax.generate.tokenizer import tokenizer_of_folder, tokenizer_of_gguf

tokenizers = pytest.importorskip("tokenizers")
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


def test_a_small_tokenizer():
    found = tokenizer_of_gguf(FIELDS)
    assert found.encode("abb") == [3, 2, 1]
    assert found.decode([3, 2, 1, 4]) == "abb"
    assert found.stop == {4}
    pytest.importorskip("jinja2")
    assert found.chat("ab") == "<s>ab"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model", "llama", r"m\.gguf: reads tokenizers of the kind gpt2.*got .*='llama'"),
        ("model", np.array([1, 2], np.int32), r"of the kind gpt2.*model=array\(\[1, 2\]"),
        ("pre", ["x"], r"of the kind gpt2.*pre=\['x'\]"),
        ("add_bos_token", np.array([True, False]), r"true or false as .*bos_token=array\("),
        ("add_bos_token", 1, r"needs true or false as tokenizer\.ggml\.add_bos_token, got .*=1"),
        ("merges", None, r"m\.gguf lacks the field tokenizer\.ggml\.merges"),
        ("merges", ("x y",), "merges do not fit its tokens"),
        ("merges", 7, r"needs texts as tokenizer\.ggml\.merges, got .*=7"),
        ("tokens", np.array([1, 2], np.int32), r"needs texts as tokenizer\.ggml\.tokens"),
        ("token_type", 3, r"needs a number for each token as .*token_type=3"),
        ("bos_token_id", 5, r"a number below 5, of tokens, as .*bos_token_id=5"),
        ("eos_token_id", -1, "eos_token_id=-1"),
        ("eot_token_id", "</s>", "eot_token_id='</s>'"),
        ("bos_token_id", True, "bos_token_id=True"),
    ],
)
def test_fields_that_are_damaged(name: str, value: Any, message: str):
    fields = FIELDS | {f"tokenizer.ggml.{name}": value}
    if value is None:
        del fields[f"tokenizer.ggml.{name}"]
    with pytest.raises(ValueError, match=rf"generate: m\.gguf.*{message}|{message}") as raised:
        tokenizer_of_gguf(fields, "m.gguf")
    assert "m.gguf" in str(raised.value)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for", "m.gguf: its chat template fails: .*; leave --chat out"),
        ("{{ 1 / 0 }}", "fails: division by zero"),
        ("{{ bos_token + 1 }}", "fails: can only concatenate"),
        ("{{ raise_exception('no system') }}", "fails: it refuses: no system"),
        ("", "m.gguf has no chat template; leave --chat out"),
    ],
)
def test_templates_that_fail(template: str, message: str):
    pytest.importorskip("jinja2")
    found = tokenizer_of_gguf(FIELDS | {"tokenizer.chat_template": template}, "m.gguf")
    with pytest.raises(ValueError, match=message):
        found.chat("ab")


@pytest.mark.parametrize(
    ("file", "said", "message"),
    [
        ("tokenizer_config.json", {"eos_token": {"id": 2}}, "eos_token lacks the field content"),
        ("tokenizer_config.json", {"bos_token": [1]}, r"needs a text as bos_token, got .*=\[1\]"),
        # JSON can spell half a pair of UTF-16, which no library takes.
        ("tokenizer_config.json", {"bos_token": "\ud800"}, "needs a text as bos_token"),
        ("tokenizer_config.json", {"chat_template": [1]}, "needs a text as chat_template"),
        ("config.json", {"eos_token_id": [[2]]}, r"got eos_token_id=\[\[2\]\]"),
    ],
)
def test_files_beside_a_tokenizer_that_are_damaged(
    file: str, said: Any, message: str, tmp_path: Path
):
    words = {"a": 0, "b": 1}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    library.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_of_folder(tmp_path).stop == frozenset()
    (tmp_path / file).write_text(json.dumps(said))
    with pytest.raises(ValueError, match=message) as raised:
        tokenizer_of_folder(tmp_path)
    assert str(tmp_path / file) in str(raised.value)
