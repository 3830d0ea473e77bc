"""Text to tokens and back, by what a GGUF file or a model's folder says."""

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mx_jax.generate.config import TEXT, TEXTS, Fields, Kind, read_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """What turns text into tokens and back."""

    encoder: Any  # of the library `tokenizers`
    first: int | None  # the token that every text begins with, or None
    stop: frozenset[int]  # tokens that end a text
    template: str | None  # of chats, in jinja2; None: the model has none
    words: Mapping[str, str]  # what a template may call by name, as `bos_token`
    where: str = "the model"  # the file, for errors

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
        """The text that asks the model to answer a message, by the model's own template."""
        if not self.template:
            raise ValueError(f"generate: {self.where} has no chat template; leave --chat out")
        # Late: most prompts are no chats.
        import jinja2.sandbox

        sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment()
        sandbox.globals["raise_exception"] = _refuse
        messages = [{"role": "user", "content": message}]
        try:
            template = sandbox.from_string(self.template)
            return template.render(messages=messages, add_generation_prompt=True, **self.words)
        except (jinja2.TemplateError, *_OF_PROGRAMS) as error:
            raise ValueError(
                f"generate: {self.where}: its chat template fails: {error}; leave --chat out"
            ) from error


# A template is a small program, and fails as programs do.
_OF_PROGRAMS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def _refuse(message: str) -> None:
    """What templates call where they do not take the messages."""
    raise ValueError(f"it refuses: {message}")


def _library() -> Any:
    """The library `tokenizers`, which is optional."""
    try:
        return importlib.import_module("tokenizers")
    except ImportError:
        raise ValueError(
            "generate: needs the package tokenizers; pip install 'mx_jax[generate]'"
        ) from None


# How text is cut before pairs are merged, by llama.cpp's name for it; each given the modules of
# `tokenizers`. Who has one more adds a row.
_PRE: dict[str, Callable[[Any, Any], Any]] = {
    "smollm": lambda parts, _: parts.Sequence(
        [parts.Digits(individual_digits=True), parts.ByteLevel(add_prefix_space=False)]
    ),
    "gpt-2": lambda parts, _: parts.ByteLevel(add_prefix_space=False),
    "llama-bpe": lambda parts, regex: parts.Sequence(
        [
            parts.Split(regex(_LLAMA3), "isolated"),
            parts.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_FLAG = Kind("true or false", lambda x: isinstance(x, bool))
_ROW = Kind("a number for each token", lambda x: np.ndim(x) == 1)
# llama.cpp's types of tokens that are never made by merging.
_CONTROL, _USER_DEFINED = 3, 4
# Tokens with a role: what a text begins with, and what ends one.
_ENDS = ("bos", "eos", "eot")


def tokenizer_of_gguf(metadata: Mapping[str, Any], where: str = "the file") -> Tokenizer:
    """A byte-level BPE tokenizer of a GGUF file's metadata."""
    library = _library()
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    # Fields of a damaged file may be arrays, which are neither compared nor looked up.
    if not (isinstance(kind, str) and isinstance(pre, str)) or kind != "gpt2" or pre not in _PRE:
        raise ValueError(
            f"generate: {where}: reads tokenizers of the kind gpt2 (byte-level BPE), cut as "
            f"{', '.join(_PRE)}, got tokenizer.ggml.model={kind!r:.80}, "
            f"tokenizer.ggml.pre={pre!r:.80}"
        )
    fields = Fields(metadata, where, "tokenizer.ggml.")
    tokens, merges = fields("tokens", TEXTS), fields("merges", TEXTS)
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    vocabulary = dict(zip(tokens, range(len(tokens)), strict=True))
    try:
        model = library.models.BPE(vocabulary, pairs, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(
            f"generate: {where}: the file's merges do not fit its tokens: {error}"
        ) from None
    encoder = library.Tokenizer(model)
    encoder.pre_tokenizer = _PRE[pre](library.pre_tokenizers, library.Regex)
    encoder.decoder = library.decoders.ByteLevel()
    # Tokens that no merging makes.
    kinds = np.asarray(fields("token_type", _ROW, ()))[: len(tokens)]
    encoder.add_tokens(
        [
            library.AddedToken(tokens[i], special=bool(kinds[i] == _CONTROL), normalized=False)
            for i in np.flatnonzero(np.isin(kinds, (_CONTROL, _USER_DEFINED)))
        ]
    )
    numbers: dict[str, int] = {}
    for name in _ENDS:
        number = fields.get(f"{name}_token_id")
        if number is None:
            continue
        is_int = isinstance(number, int) and not isinstance(number, bool)
        if not is_int or not 0 <= number < len(tokens):
            needed = f"a number below {len(tokens)}, of tokens,"
            raise fields.refused(f"{name}_token_id", needed, number)
        numbers[name] = number
    begins = fields("add_bos_token", _FLAG, False)
    said = Fields(metadata, where, "tokenizer.")
    return Tokenizer(
        encoder=encoder,
        first=numbers.get("bos") if begins else None,
        stop=frozenset(number for name, number in numbers.items() if name != "bos"),
        template=_text(said, "chat_template"),
        words={f"{name}_token": tokens[number] for name, number in numbers.items()},
        where=where,
    )


def tokenizer_of_folder(folder: Path) -> Tokenizer:
    """The tokenizer of tokenizer.json, and what the files beside it say."""
    library, path = _library(), folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"generate: there is no tokenizer.json in {folder}")
    try:
        encoder = library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"generate: {path} is no tokenizer: {error}") from None
    stated = folder / "tokenizer_config.json"
    said = Fields(read_json(stated), str(stated))
    texts = {name: _text(said, name) for name in ("bos_token", "eos_token")}
    words = {name: text for name, text in texts.items() if text is not None}
    # What the tokenizer puts before every text, if it does.
    added = encoder.encode("", add_special_tokens=True).ids
    bos = encoder.token_to_id(words["bos_token"]) if "bos_token" in words else None
    # Every file may name tokens that end a text.
    stop = [encoder.token_to_id(words["eos_token"])] if "eos_token" in words else []
    for file in ("generation_config.json", "config.json"):
        ends = read_json(folder / file).get("eos_token_id")
        each = ends if isinstance(ends, list) else [ends]
        if not all(isinstance(token, int | None) for token in each):
            raise ValueError(
                f"generate: {folder / file}: needs numbers of tokens as eos_token_id, "
                f"got eos_token_id={ends!r:.80}"
            )
        stop += each
    return Tokenizer(
        encoder=encoder,
        first=bos if bos is not None and added[:1] == [bos] else None,
        stop=frozenset(int(token) for token in stop if token is not None),
        template=_template(folder, said),
        words=words,
        where=str(folder),
    )


def _text(said: Fields, name: str) -> str | None:
    """A text that may be missing; of a token it may stand with options of it."""
    if isinstance(said.get(name), dict):
        return Fields(said.get(name), f"{said.where}, {name}")("content", TEXT)
    return said(name, TEXT, "") or None


def _template(folder: Path, said: Fields) -> str | None:
    """The chat's template: a file of its own, or one of those in tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = said.said.get("chat_template")
    if isinstance(found, list) and all(isinstance(each, dict) for each in found):
        found = next((each for each in found if each.get("name") == "default"), {})
        said = Fields({"chat_template": found.get("template")}, said.where)
    return _text(said, "chat_template")
