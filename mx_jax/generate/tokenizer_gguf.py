"""A tokenizer of a GGUF file's metadata."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mx_jax.generate.fields import Fields
from mx_jax.generate.tokenizer import Tokenizer, library_named

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
# Tokens with a role: what a text begins with, and what ends one.
_ENDS = ("bos", "eos", "eot")


def tokenizer_of_gguf(metadata: Mapping[str, Any], where: str = "the file") -> Tokenizer:
    """A byte-level BPE tokenizer of a GGUF file's metadata.

    Args:
      metadata: fields by name.
      where: the file's path, for errors.

    Raises:
      ValueError: a kind of tokenizer that is not known, fields that are missing or of another type,
        or the library `tokenizers` is missing.
    """
    library = library_named("tokenizers")
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    # Fields of a damaged file may be arrays, which are neither compared nor looked up.
    if not (isinstance(kind, str) and isinstance(pre, str)) or kind != "gpt2" or pre not in _PRE:
        raise ValueError(
            f"generate: {where}: reads tokenizers of the kind gpt2 (byte-level BPE), cut as "
            f"{', '.join(_PRE)}, got tokenizer.ggml.model={kind!r:.80}, "
            f"tokenizer.ggml.pre={pre!r:.80}"
        )
    tokens, merges = (_texts(metadata, name, where) for name in ("tokens", "merges"))
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        model = library.models.BPE(vocabulary, pairs, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(
            f"generate: {where}: the file's merges do not fit its tokens: {error}"
        ) from None
    encoder = library.Tokenizer(model)
    encoder.pre_tokenizer = _PRE[pre](library.pre_tokenizers, library.Regex)
    encoder.decoder = library.decoders.ByteLevel()
    encoder.add_tokens(_special(library, tokens, metadata, where))
    numbers = _numbers(metadata, len(tokens), where)
    begins = metadata.get("tokenizer.ggml.add_bos_token", False)
    if not isinstance(begins, bool):
        raise ValueError(
            f"generate: {where}: needs true or false as tokenizer.ggml.add_bos_token, got "
            f"tokenizer.ggml.add_bos_token={begins!r:.80}"
        )
    said = Fields(metadata, where, "tokenizer.")
    return Tokenizer(
        encoder=encoder,
        first=numbers.get("bos") if begins else None,
        stop=frozenset(number for name, number in numbers.items() if name != "bos"),
        template=said.text("chat_template") if said.has("chat_template") else None,
        words={f"{name}_token": tokens[number] for name, number in numbers.items()},
        where=where,
    )


def _special(library: Any, tokens: list[str], metadata: Mapping[str, Any], where: str) -> list[Any]:
    """The tokens that no merging makes."""
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    if np.ndim(kinds) != 1:
        raise ValueError(
            f"generate: {where}: needs a number for each token as tokenizer.ggml.token_type, got "
            f"tokenizer.ggml.token_type={kinds!r:.80}"
        )
    return [
        library.AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _texts(metadata: Mapping[str, Any], name: str, where: str) -> list[str]:
    """A field that is a row of texts."""
    field = f"tokenizer.ggml.{name}"
    if field not in metadata:
        raise ValueError(f"generate: {where} lacks the field {field}")
    found = metadata[field]
    if not isinstance(found, list | tuple) or not all(isinstance(each, str) for each in found):
        raise ValueError(f"generate: {where}: needs texts as {field}, got {field}={found!r:.80}")
    return list(found)


def _numbers(metadata: Mapping[str, Any], count: int, where: str) -> dict[str, int]:
    """The tokens that have a role, each one of `count`."""
    found: dict[str, int] = {}
    for name in _ENDS:
        field = f"tokenizer.ggml.{name}_token_id"
        number = metadata.get(field)
        if number is None:
            continue
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count:
            raise ValueError(
                f"generate: {where}: needs a number below {count}, of tokens, as {field}, got "
                f"{field}={number!r:.80}"
            )
        found[name] = number
    return found
