"""A tokenizer of a model's folder, as Hugging Face's hub has them."""

from pathlib import Path
from typing import Any

from mx_jax.generate.hub import read_json
from mx_jax.generate.tokenizer import Tokenizer, library_named


def tokenizer_of_folder(folder: Path) -> Tokenizer:
    """The tokenizer of tokenizer.json, and what the files beside it say.

    Args:
      folder: of the model.

    Raises:
      ValueError: there is none, it is damaged, or the library `tokenizers` is missing.
    """
    library, path = library_named("tokenizers"), folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"generate: there is no tokenizer.json in {folder}")
    try:
        encoder = library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"generate: {path} is no tokenizer: {error}") from None
    said = read_json(folder / "tokenizer_config.json")
    words = {name: _text(said[name]) for name in ("bos_token", "eos_token") if said.get(name)}
    # What the tokenizer puts before every text, if it does.
    added = encoder.encode("", add_special_tokens=True).ids
    bos = encoder.token_to_id(words["bos_token"]) if "bos_token" in words else None
    return Tokenizer(
        encoder=encoder,
        first=bos if bos is not None and added[:1] == [bos] else None,
        stop=_stop(folder, encoder, words),
        template=_template(folder, said),
        words=words,
    )


def _text(token: Any) -> str:
    """A token's text, which may stand with options of it."""
    return str(token["content"] if isinstance(token, dict) else token)


def _stop(folder: Path, encoder: Any, words: dict[str, str]) -> frozenset[int]:
    """Tokens that end a text: of all files that name one."""
    found: list[Any] = []
    for file in ("generation_config.json", "config.json"):
        said = read_json(folder / file).get("eos_token_id")
        found += said if isinstance(said, list) else [said]
    if "eos_token" in words:
        found.append(encoder.token_to_id(words["eos_token"]))
    return frozenset(int(token) for token in found if token is not None)


def _template(folder: Path, said: dict[str, Any]) -> str | None:
    """The chat's template: a file of its own, or one of those in tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = said.get("chat_template")
    if isinstance(found, list):
        by_name = {each.get("name"): each.get("template") for each in found}
        return by_name.get("default")
    return found
