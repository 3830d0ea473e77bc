"""A tokenizer of a GGUF file's metadata."""

from collections.abc import Callable, Mapping
from typing import Any

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


def tokenizer_of_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """A byte-level BPE tokenizer of a GGUF file's metadata.

    Args:
      metadata: fields by name.

    Raises:
      ValueError: a kind of tokenizer that is not known, fields that are missing, or the library
        `tokenizers` is.
    """
    library = library_named("tokenizers")
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
        raise ValueError(f"generate: the file's merges do not fit its tokens: {error}") from None
    encoder = library.Tokenizer(model)
    encoder.pre_tokenizer = _PRE[pre](library.pre_tokenizers, library.Regex)
    encoder.decoder = library.decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type", [])
    special = [
        library.AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    encoder.add_tokens(special)
    given = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _ENDS}
    numbers = {name: int(number) for name, number in given.items() if number is not None}
    begins = metadata.get("tokenizer.ggml.add_bos_token", False)
    return Tokenizer(
        encoder=encoder,
        first=numbers.get("bos") if begins else None,
        stop=frozenset(number for name, number in numbers.items() if name != "bos"),
        template=metadata.get("tokenizer.chat_template"),
        words={f"{name}_token": tokens[number] for name, number in numbers.items()},
    )


def _field(metadata: Mapping[str, Any], name: str) -> Any:
    if f"tokenizer.ggml.{name}" not in metadata:
        raise ValueError(f"generate: the file lacks the field tokenizer.ggml.{name}")
    return metadata[f"tokenizer.ggml.{name}"]
