"""Text to tokens and back."""

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """What turns text into tokens and back.

    Attributes:
      encoder: of the library `tokenizers`.
      first: the token that every text begins with, or None.
      stop: tokens that end a text.
      template: of chats, in jinja2; None: the model has none.
      words: what a template may call by name, as `bos_token`.
      where: the file, for errors.
    """

    encoder: Any
    first: int | None
    stop: frozenset[int]
    template: str | None
    words: Mapping[str, str]
    where: str = "the model"

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
        """The text that asks the model to answer a message, by the model's own template.

        Raises:
          ValueError: it has none, it refuses or is damaged, or the library `jinja2` is missing.
        """
        if not self.template:
            raise ValueError(f"generate: {self.where} has no chat template; leave --chat out")
        sandbox = library_named("jinja2.sandbox").ImmutableSandboxedEnvironment()
        sandbox.globals["raise_exception"] = _refuse
        messages = [{"role": "user", "content": message}]
        try:
            template = sandbox.from_string(self.template)
            return template.render(messages=messages, add_generation_prompt=True, **self.words)
        except (library_named("jinja2").TemplateError, *_OF_PROGRAMS) as error:
            raise ValueError(
                f"generate: {self.where}: its chat template fails: {error}; leave --chat out"
            ) from error


# A template is a small program, and fails as programs do.
_OF_PROGRAMS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def _refuse(message: str) -> None:
    """What templates call where they do not take the messages."""
    raise ValueError(f"it refuses: {message}")


def library_named(name: str) -> Any:
    """An optional library.

    Raises:
      ValueError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise ValueError(
            f"generate: needs the package {package}; pip install 'mx_jax[generate]'"
        ) from None
