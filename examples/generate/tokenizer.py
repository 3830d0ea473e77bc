"""Text to tokens and back, by what a GGUF file or a model's folder says."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2.sandbox
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """What turns text into tokens and back."""

    encoder: Any  # of the library `tokenizers`
    first: int | None  # the token that every text begins with, or None
    stop: frozenset[int]  # tokens that end a text
    template: str | None  # of chats, in jinja2; None: the model has none
    words: Mapping[str, str]  # what a template may call by name, as `bos_token`

    def encode(self, text: str) -> list[int]:
        """Numbers of the text's tokens; special ones are written as they are called."""
        tokens = self.encoder.encode(text, add_special_tokens=False).ids
        # A chat's template may have written the first one already.
        if self.first is None or tokens[:1] == [self.first]:
            return tokens
        return [self.first, *tokens]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones left out; a character cut in two ends in U+FFFD."""
        return self.encoder.decode(list(tokens), skip_special_tokens=True)

    def chat(self, message: str) -> str:
        """A message as a prompt, by the model's chat template."""
        if not self.template:
            raise ValueError("generate: the model has no chat template; leave --chat out")
        messages = [{"role": "user", "content": message}]
        try:
            template = jinja2.sandbox.ImmutableSandboxedEnvironment().from_string(self.template)
            return template.render(messages=messages, add_generation_prompt=True, **self.words)
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError) as error:
            raise ValueError(
                f"generate: the model's chat template fails: {error}; leave --chat out"
            ) from error


_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Ways to cut text before pairs are merged, by llama.cpp's names: functions of the module
# `tokenizers`. One more is a row.
CUTS: dict[str, Callable[[Any], list[Any]]] = {
    "smollm": lambda t: [t.pre_tokenizers.Digits(individual_digits=True), _bytes(t)],
    "gpt-2": lambda t: [_bytes(t)],
    "llama-bpe": lambda t: [
        t.pre_tokenizers.Split(t.Regex(_LLAMA3), "isolated"),
        _bytes(t, use_regex=False),
    ],
}


def _bytes(tokenizers: Any, **options: Any) -> Any:
    return tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, **options)


# llama.cpp's types of tokens that are never made by merging.
_CONTROL, _USER_DEFINED = 3, 4


def tokenizer_of_gguf(fields: Mapping[str, Any]) -> Tokenizer:
    """A byte-level BPE tokenizer of a GGUF file's metadata."""
    import tokenizers

    said = {name.removeprefix("tokenizer.ggml."): value for name, value in fields.items()}
    kind, pre = said.get("model"), said.get("pre")
    if kind != "gpt2" or pre not in CUTS:
        raise ValueError(
            f"generate: reads tokenizers of the kind gpt2 (byte-level BPE), cut as "
            f"{', '.join(CUTS)}, got tokenizer.ggml.model={kind!r}, tokenizer.ggml.pre={pre!r}"
        )
    tokens = list(said["tokens"])
    pairs = [tuple(merge.split(" ", 1)) for merge in said["merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    model = tokenizers.models.BPE(vocabulary, pairs, ignore_merges=pre == "llama-bpe")
    encoder: Any = tokenizers.Tokenizer(model)
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(CUTS[pre](tokenizers))
    encoder.decoder = tokenizers.decoders.ByteLevel()
    # Tokens that no merging makes.
    kinds = np.asarray(said.get("token_type", ()))
    encoder.add_tokens(
        [
            tokenizers.AddedToken(tokens[i], special=bool(kinds[i] == _CONTROL), normalized=False)
            for i in np.flatnonzero(np.isin(kinds, (_CONTROL, _USER_DEFINED)))
        ]
    )
    ends = {name: said.get(f"{name}_token_id") for name in ("bos", "eos", "eot")}
    numbers = {name: int(number) for name, number in ends.items() if number is not None}
    return Tokenizer(
        encoder=encoder,
        first=numbers.get("bos") if said.get("add_bos_token") else None,
        stop=frozenset(number for name, number in numbers.items() if name != "bos"),
        template=fields.get("tokenizer.chat_template"),
        words={f"{name}_token": tokens[number] for name, number in numbers.items()},
    )


def tokenizer_of_folder(folder: Path) -> Tokenizer:
    """The tokenizer of tokenizer.json, and what the files beside it say."""
    import tokenizers

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"generate: there is no tokenizer.json in {folder}")
    encoder = tokenizers.Tokenizer.from_file(str(path))
    said = read_json(folder / "tokenizer_config.json")
    # The text of a token may stand with options of it.
    texts = {name: said.get(name) for name in ("bos_token", "eos_token")}
    words = {n: t["content"] if isinstance(t, dict) else t for n, t in texts.items() if t}
    # What the tokenizer puts before every text, if it does.
    added = encoder.encode("", add_special_tokens=True).ids
    bos = encoder.token_to_id(words["bos_token"]) if "bos_token" in words else None
    # Every file may name tokens that end a text.
    stop = [encoder.token_to_id(words["eos_token"])] if "eos_token" in words else []
    for file in ("generation_config.json", "config.json"):
        ends = read_json(folder / file).get("eos_token_id")
        stop += ends if isinstance(ends, list) else [ends]
    template = said.get("chat_template")
    if (file := folder / "chat_template.jinja").is_file():
        template = file.read_text(encoding="utf-8")
    elif isinstance(template, list):  # several, by name
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    return Tokenizer(
        encoder=encoder,
        first=bos if bos is not None and added[:1] == [bos] else None,
        stop=frozenset(int(token) for token in stop if token is not None),
        template=template,
        words=words,
    )


def read_json(path: Path) -> dict[str, Any]:
    """A table of a file; an empty one where there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
