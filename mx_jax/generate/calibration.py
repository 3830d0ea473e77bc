"""What a model's products read while it reads texts: what GPTQ of its weights needs to know."""

import pydoc_data.topics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mx_jax.calibrate.moments import Moments, moments
from mx_jax.calibrate.ways import GPTQ, SEARCHED, Gptq, SearchedScales, Way
from mx_jax.checkpoint.folder import progress_bar
from mx_jax.generate.config import LlamaConfig
from mx_jax.generate.model import PARTS, Llama
from mx_jax.generate.names import Names
from mx_jax.generate.tokenizer import Tokenizer
from mx_jax.recipes import high_precision

# More texts bring little: how many tokens are read at most, and in sequences of what length.
TOKENS, LENGTH = 20480, 512


def way_named(
    scales: str | None,
    params: Any,
    config: LlamaConfig,
    tokenizer: Tokenizer,
    texts: Sequence[Path],
) -> Way | None:
    """How weights get their codes, by the command line's name for it.

    Args:
      scales: `"mse"`, `"gptq"` or None, as a cast gives them.
      params: of the model, as `params_of` gives them; read by GPTQ, and so is all that follows.
      config: sizes of the model.
      tokenizer: the model's.
      texts: files to calibrate with; none: Python's own manual.

    Raises:
      ValueError: texts for what reads none, or as `model_moments` does.
    """
    if texts and scales != GPTQ:
        raise ValueError(f"generate: texts are for scales={GPTQ}, got scales={scales}")
    if scales is None:
        return None
    if scales == SEARCHED:
        return SearchedScales()
    if scales != GPTQ:
        raise ValueError(f"generate: scales must be {SEARCHED} or {GPTQ}, got scales={scales!r}")
    return Gptq(model_moments(params, config, tokenizer, texts))


def model_moments(
    params: Any, config: LlamaConfig, tokenizer: Tokenizer, texts: Sequence[Path] = ()
) -> Moments:
    """`calibrate.moments` of a model, its head's among them, by paths of its parameters.

    Args:
      params: of the model in high precision.
      config: its sizes.
      tokenizer: its own.
      texts: files; none: the manual that comes with Python, in English.

    Raises:
      ValueError: fewer tokens than one sequence has, or a file that is no text in UTF-8.
    """
    length = min(LENGTH, config.context)
    tokens = tokenizer.encode("\n".join(map(_read, texts)) if texts else manual())[:TOKENS]
    count = len(tokens) // length
    if not count:
        raise ValueError(
            f"generate: calibration needs a text of {length} tokens at least, got {len(tokens)}; "
            "give more, or leave it out for Python's own manual"
        )
    sequences = np.array(tokens[: count * length], np.int32).reshape(count, 1, length)
    model = Llama(config, high_precision())
    return moments(model, _watched(sequences), variables={"params": params})


def by_tensors(found: Moments, names: Names, config: LlamaConfig) -> dict[str, Any]:
    """Moments by the names of a checkpoint's tensors, whose products may be parts of the model's.

    Args:
      found: as `model_moments` gives them.
      names: of the tensors.
      config: sizes of the model.
    """
    field_of = {part: whole for whole, parts in PARTS.items() for part in parts}
    field_of |= {"out": "attention_out", "down": "down"}
    by_name = {
        getattr(names, field).format(index): found[f"layers_{index}/{path}"]
        for index in range(config.layers)
        for field, path in field_of.items()
    }
    head = "embedding" if config.tied else "head"
    return by_name | {getattr(names, head): found[head]}


def manual() -> str:
    """Python's own manual of its language, which every installation has; in order of its topics."""
    topics: Mapping[str, str] = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"generate: {path} is no text in UTF-8: {error}") from None


def _watched(sequences: np.ndarray) -> Iterator[np.ndarray]:
    """The sequences, with a bar on a terminal."""
    with progress_bar("calibrate", len(sequences), sys.stderr.isatty()) as step:
        for sequence in sequences:
            yield sequence
            step("", 1)
