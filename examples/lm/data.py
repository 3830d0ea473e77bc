"""Text as characters: where it comes from, how it is split, how it is batched."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Modules of the standard library whose docstrings are mostly prose: about 400 kB.
DOCSTRING_MODULES = (
    "_pydecimal argparse ast bdb collections configparser datetime difflib doctest enum "
    "fractions imaplib inspect ipaddress json logging mailbox optparse pathlib pdb pickletools "
    "platform pydoc random re shutil smtplib socket socketserver ssl statistics subprocess "
    "tarfile tempfile textwrap threading traceback typing uuid zipfile"
).split()

VALIDATION_FRACTION = 0.1


class DataError(Exception):
    """The text cannot be used; the message says why and what to do."""


def standard_library_text() -> str:
    """English that every Python carries: the language reference's topics and docstrings.

    About 0.9 MB. It differs between Python versions, hence the fingerprint in `Corpus`.
    """
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        raise DataError(
            "this Python has no pydoc_data.topics (a minimal install); pass --data FILE"
        ) from None
    documents = [topics[name] for name in sorted(topics)]
    documents += [_docstrings(module) for module in DOCSTRING_MODULES]
    # Shuffled, so that the last tenth is validation text of the same kind as the rest.
    random.Random(0).shuffle(documents)
    return "\n\n".join(documents)


def _docstrings(module: str) -> str:
    """The docstrings of one module, read from its source without running it."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return ""
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented))
    return "\n\n".join(text for text in texts if text)


def file_text(path: Path) -> str:
    """The text of a UTF-8 file, or a `DataError` that names the file and the fault."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"no such file: {path}") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"not UTF-8 text: {path} (byte 0x{error.object[error.start]:02x} at {error.start})"
        ) from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """A text as character indices into `vocabulary`, its last tenth held out."""

    vocabulary: str
    train: np.ndarray
    validation: np.ndarray
    fingerprint: str

    @classmethod
    def from_text(cls, text: str, *, batch: int, context: int) -> Corpus:
        """Splits `text`; it must hold one validation batch, or a `DataError` says how much."""
        validation_size = int(len(text) * VALIDATION_FRACTION)
        if validation_size < batch * context + 1:
            needed = int((batch * context + 2) / VALIDATION_FRACTION)
            raise DataError(
                f"text too short: {len(text):,} characters, but batch={batch} x "
                f"context={context} needs {needed:,} (a tenth of it is for validation)"
            )
        vocabulary, tokens = np.unique(
            np.frombuffer(text.encode("utf-32-le"), np.uint32), return_inverse=True
        )
        tokens = tokens.astype(np.int32)
        return cls(
            vocabulary="".join(map(chr, vocabulary)),
            train=tokens[:-validation_size],
            validation=tokens[-validation_size:],
            fingerprint=hashlib.sha256(text.encode()).hexdigest()[:16],
        )

    def batch(self, *, seed: int, step: int, batch: int, context: int) -> np.ndarray:
        """Random windows [batch, context + 1]: a pure function of seed and step.

        Nothing to save, so a resumed run reads on where it stopped.
        """
        generator = np.random.default_rng((seed, step))
        starts = generator.integers(0, len(self.train) - context, size=(batch, 1))
        return self.train[starts + np.arange(context + 1)]

    def validation_batches(self, *, batch: int, context: int, tokens: int) -> np.ndarray:
        """Adjacent windows [batches, batch, context + 1] of the first `tokens` held out."""
        usable = min(tokens, len(self.validation) - 1)
        batches = max(1, usable // (batch * context))
        starts = context * np.arange(batches * batch).reshape(batches, batch, 1)
        return self.validation[starts + np.arange(context + 1)]

    def encode(self, text: str) -> np.ndarray:
        """Indices of `text`, or a `DataError` naming the characters the corpus lacks."""
        missing = sorted(set(text) - set(self.vocabulary))
        if missing:
            raise DataError(f"characters that the text never uses: {' '.join(map(repr, missing))}")
        index = {character: i for i, character in enumerate(self.vocabulary)}
        return np.array([index[character] for character in text], np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        """The text behind indices."""
        return "".join(self.vocabulary[token] for token in tokens)
