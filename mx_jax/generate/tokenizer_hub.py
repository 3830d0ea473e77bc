"""A tokenizer of a model's folder, as Hugging Face's hub has them."""

from pathlib import Path
from typing import Any

from mx_jax.generate.fields import Fields
from mx_jax.generate.hub import read_json
from mx_jax.generate.tokenizer import Tokenizer, library_named

STATED = "tokenizer_config.json"


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
    said = Fields(read_json(folder / STATED), str(folder / STATED))
    words = {name: _text(said, name) for name in ("bos_token", "eos_token") if said.said.get(name)}
    # What the tokenizer puts before every text, if it does.
    added = encoder.encode("", add_special_tokens=True).ids
    bos = encoder.token_to_id(words["bos_token"]) if "bos_token" in words else None
    return Tokenizer(
        encoder=encoder,
        first=bos if bos is not None and added[:1] == [bos] else None,
        stop=_stop(folder, encoder, words),
        template=_template(folder, said),
        words=words,
        where=str(folder),
    )


def _text(said: Fields, name: str) -> str:
    """A token's text, which may stand with options of it."""
    token = said.said[name]
    if isinstance(token, dict):
        return Fields(token, f"{said.where}, {name}").text("content")
    return said.text(name)


def _stop(folder: Path, encoder: Any, words: dict[str, str]) -> frozenset[int]:
    """Tokens that end a text: of all files that name one."""
    found: list[Any] = []
    for file in ("generation_config.json", "config.json"):
        said = read_json(folder / file).get("eos_token_id")
        each = said if isinstance(said, list) else [said]
        if not all(isinstance(token, int | None) for token in each):
            raise ValueError(
                f"generate: {folder / file}: needs numbers of tokens as eos_token_id, "
                f"got eos_token_id={said!r:.80}"
            )
        found += each
    if "eos_token" in words:
        found.append(encoder.token_to_id(words["eos_token"]))
    return frozenset(int(token) for token in found if token is not None)


def _template(folder: Path, said: Fields) -> str | None:
    """The chat's template: a file of its own, or one of those in tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = said.said.get("chat_template")
    if isinstance(found, list) and all(isinstance(each, dict) for each in found):
        found = next((each for each in found if each.get("name") == "default"), {})
        said = Fields({"chat_template": found.get("template")}, said.where)
    return said.text("chat_template") if said.has("chat_template") else None
