"""Text to tokens and back, as a GGUF file's metadata say."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
# llama.cpp's types of tokens that are never made by merging.
_CONTROL, _USER_DEFINED = 3, 4


class Tokenizer:
    """A byte-level BPE tokenizer.

    Attributes:
      stop: tokens that end a text.
    """

    def __init__(self, metadata: Mapping[str, Any]):
        """Make it of a GGUF file's metadata.

        Args:
          metadata: fields by name.

        Raises:
          ValueError: a kind of tokenizer that is not known, fields that are missing, or the
            library `tokenizers` is.
        """
        library = _library("tokenizers")
        kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
        if kind != "gpt2" or pre not in _PRE:
            raise ValueError(
                "generate: reads tokenizers of the kind gpt2 (byte-level BPE), cut as "
                f"{', '.join(_PRE)}, got tokenizer.ggml.model={kind!r}, tokenizer.ggml.pre={pre!r}"
            )
        tokens, merges = (list(_field(metadata, name)) for name in ("tokens", "merges"))
        pairs = [tuple(merge.split(" ", 1)) for merge in merges]
        vocabulary = {token: index for index, token in enumerate(tokens)}
        try:
            model = library.models.BPE(vocabulary, pairs, ignore_merges=pre == "llama-bpe")
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(
                f"generate: the file's merges do not fit its tokens: {error}"
            ) from None
        self._tokenizer = library.Tokenizer(model)
        self._tokenizer.pre_tokenizer = _PRE[pre](library.pre_tokenizers, library.Regex)
        self._tokenizer.decoder = library.decoders.ByteLevel()
        types = metadata.get("tokenizer.ggml.token_type", [])
        special = [
            library.AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=False)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
        self._tokenizer.add_tokens(special)
        self._first = metadata.get("tokenizer.ggml.bos_token_id")
        if not metadata.get("tokenizer.ggml.add_bos_token", False):
            self._first = None
        self._template = metadata.get("tokenizer.chat_template")
        last = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
        self.stop = frozenset(int(each) for each in last if each is not None)

    def encode(self, text: str) -> list[int]:
        """Numbers of the text's tokens; special ones are written as they are called."""
        tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        return tokens if self._first is None else [int(self._first), *tokens]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones left out; a character cut in two ends in U+FFFD."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def chat(self, message: str) -> str:
        """The text that asks the model to answer a message, by the file's own template.

        Raises:
          ValueError: the file has none, or the library `jinja2` is missing.
        """
        if not self._template:
            raise ValueError("generate: the file has no tokenizer.chat_template; leave --chat out")
        sandbox = _library("jinja2.sandbox").ImmutableSandboxedEnvironment()
        messages = [{"role": "user", "content": message}]
        template = sandbox.from_string(self._template)
        return template.render(messages=messages, add_generation_prompt=True)


def _field(metadata: Mapping[str, Any], name: str) -> Any:
    if f"tokenizer.ggml.{name}" not in metadata:
        raise ValueError(f"generate: the file lacks the field tokenizer.ggml.{name}")
    return metadata[f"tokenizer.ggml.{name}"]


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise ValueError(
            f"generate: needs the package {package}; pip install 'mx_jax[generate]'"
        ) from None
