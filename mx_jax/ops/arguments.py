"""What the differentiable products take: operands, dtypes, dimension numbers, keys."""

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType

from mx_jax.backends.calls import AnyOperand, RandomBitsCall
from mx_jax.backends.primitive import bind
from mx_jax.codecs import float32
from mx_jax.codecs.blocks import Blocks, check_parts, tensor_scale_violation
from mx_jax.codecs.rounding import DerivedKey
from mx_jax.formats import ELEMENT_FORMATS, BlockFormat, BlockSize, Whole, block_format
from mx_jax.formats.element import unknown_name
from mx_jax.mxarray import MXArray
from mx_jax.packed import OperandLike, PackedMXArray, Quantized
from mx_jax.specs import MatmulRecipe, OperandSpec


def as_operand(
    x: OperandLike, side: str, recipe: MatmulRecipe, operation: str = "matmul"
) -> AnyOperand:
    """An MXArray as it is, else an array the recipe takes."""
    if isinstance(x, PackedMXArray):
        x.layout.check(x)
        # Packed weights are read on the right.
        return x.unpack() if side == "lhs" else x
    if isinstance(x, MXArray):
        check_parts(x, f"{operation}: {side}")
        return x
    if not recipe.is_high_precision:
        x = _narrow_floats_to_bfloat16(x)
    if isinstance(x, np.ndarray | np.generic) and not x.dtype.isnative:
        raise TypeError(
            f"{operation}: {side} must have this machine's byte order, got dtype={x.dtype.str}, "
            f"shape={x.shape}; convert it first, e.g. "
            f"{side}.astype({side}.dtype.newbyteorder('='))"
        )
    try:
        array = x if isinstance(x, jax.Array) else jnp.asarray(x)
    except jax.errors.JAXTypeError:
        # About tracers: JAX says it best.
        raise
    except (TypeError, ValueError):
        kind = type(x).__name__
        described = f"{kind} of dtype={x.dtype}" if isinstance(x, np.ndarray) else kind
        raise TypeError(
            f"{operation}: {side} must be an array of numbers or an MXArray, got {side} of type "
            f"{described}; pass what jnp.asarray takes"
        ) from None
    # asarray quietly narrows NumPy's float64 and int64: what was passed is judged.
    name = np.dtype(getattr(x, "dtype", array.dtype)).name
    if name in QUANTIZABLE or recipe.is_high_precision:
        return array
    raise TypeError(
        f"{operation}: {side} must be float32, bfloat16, float16 or an MXArray, got dtype={name}, "
        f"shape={array.shape}; convert it first, e.g. {side}.astype(jnp.float32)"
    )


def goes_to_lax(recipe: MatmulRecipe, lhs: AnyOperand, rhs: AnyOperand) -> bool:
    """Whether nothing is quantized: neither by the recipe, nor as it comes."""
    return recipe.is_high_precision and not any(isinstance(x, Quantized) for x in (lhs, rhs))


def check_precision(precision: lax.PrecisionLike, operation: str) -> None:
    """Raise ValueError unless `jax.lax.dot_general` takes the precision."""
    if precision is None or isinstance(precision, lax.Precision):
        return
    x = jax.ShapeDtypeStruct((1,), np.float32)
    try:
        jax.eval_shape(lambda x: jnp.dot(x, x, precision=precision), x)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{operation}: {error}; got precision={precision!r}") from None


def check_out_dtype(dtype: jax.typing.DTypeLike | None, operation: str) -> None:
    """Raise TypeError unless a quantized product may have the dtype; None stands for a default."""
    if dtype is None or jnp.issubdtype(dtype, jnp.floating):
        return
    raise TypeError(
        f"{operation}: the product of quantized operands is floating point, got "
        f"preferred_element_type={jnp.dtype(dtype).name}; use float32, bfloat16 or float16, and "
        "convert the result"
    )


def dtype_of_product(
    wanted: jax.typing.DTypeLike | None, lhs: AnyOperand, rhs: AnyOperand, operation: str
) -> np.dtype:
    """The dtype of a quantized product: what is wanted, checked, or the operands' common dtype."""
    check_out_dtype(wanted, operation)
    if wanted is None:
        return np.dtype(jnp.result_type(lhs.dtype, rhs.dtype))
    return float32.canonical_dtype(wanted)


def explicit_mesh(*operands: object) -> AbstractMesh | None:
    """The mesh in use, else that of an operand, if it has axes of `AxisType.Explicit`; or None."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        # Codes that have a source stay with it.
        leaves = jax.tree.leaves(operands, is_leaf=lambda x: getattr(x, "primal", None) is not None)
        meshes = (jax.typeof(getattr(x, "codes", x)).sharding.mesh for x in leaves)
        mesh = next((x_mesh for x_mesh in meshes if not x_mesh.empty), mesh)
    return mesh if AxisType.Explicit in mesh.axis_types else None


R = TypeVar("R", bound=MatmulRecipe)

NAMED: dict[str, Callable[[], MatmulRecipe]] = {}
"""What makes the recipe that a name stands for."""

RECIPES_OF_A_FORMAT: dict[str, Callable[[str], MatmulRecipe]] = {}
"""Recipes that need a format beside their name."""


def named_recipe(name: str) -> MatmulRecipe:
    """The recipe of a name; case and `-` for `_` do not matter, as in the names of formats."""
    make = NAMED.get(name.strip().lower().replace("-", "_"))
    if make is not None:
        return make()
    meant = ""
    if name in RECIPES_OF_A_FORMAT:
        meant = f", a recipe of a format: write recipes.{name}(format)"
    else:
        with contextlib.suppress(ValueError):
            block_format(name)
            meant = (
                ", a block format: recipes.weight_only and qat take one, and with_(weights=, "
                "activations=, gradients=) of a recipe"
            )
    raise unknown_name("recipe name", name, NAMED, meant)


def as_recipe(recipe: object, operation: str, kind: type[R] = MatmulRecipe) -> R:
    """A recipe as it is, a name as the recipe that it stands for.

    Raises:
      ValueError: unknown name; the message lists the known.
      TypeError: neither a recipe nor a name, `None` and a function that was not called among them.
    """
    if isinstance(recipe, str):
        try:
            recipe = named_recipe(recipe)
        except ValueError as error:
            raise ValueError(f"{operation}: {error}") from None
    if isinstance(recipe, kind):
        return recipe
    hint = "call it: recipes are functions" if callable(recipe) else "e.g. mx_jax.recipes.mxfp8()"
    raise TypeError(
        f"{operation}: recipe must be a Recipe ({hint}), got recipe={recipe!r}; or the name of "
        f"one: {', '.join(NAMED)}"
    )


QUANTIZABLE = ("float32", "bfloat16", "float16")
_NARROW = {element.dtype for element in ELEMENT_FORMATS if element.kind == "float"}


def _narrow_floats_to_bfloat16(x: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
    """Arrays of float8 and narrower floats as the same values in bfloat16, which holds them all."""
    return jnp.asarray(x, jnp.bfloat16) if getattr(x, "dtype", None) in _NARROW else x


def as_quantizable(x: jax.typing.ArrayLike, operation: str) -> jax.Array:
    """x as an array of a dtype that can be quantized; TypeError with the remedy for any other."""
    x = _narrow_floats_to_bfloat16(x)
    array = x if isinstance(x, jax.Array) else jnp.asarray(x)
    name = np.dtype(getattr(x, "dtype", array.dtype)).name  # as above
    if name not in QUANTIZABLE:
        raise TypeError(
            f"{operation}: needs float32, bfloat16 or float16 input, got dtype={name}, "
            f"shape={array.shape}; convert it first, e.g. x.astype(jnp.float32)"
        )
    return array


def blocks_along(shape: tuple[int, ...], axis: int, format: BlockFormat) -> Blocks:
    """The blocks of an array quantized along one axis.

    A two-dimensional format also covers the neighbouring axis: the one before, or the next one
    where there is none before.

    Raises:
      ValueError: axis out of range.
      TypeError: axis is not an int.
    """
    axis = as_axis(axis, "quantize")
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"quantize: axis={axis} is out of range for shape={shape}; "
            + ("a scalar has no axis for blocks" if not shape else f"use -{len(shape)}..-1 or 0..")
        )
    contracting = axis % len(shape) - len(shape)
    kept_size, contracting_size = format.block
    sizes: dict[int, BlockSize] = {contracting: contracting_size}
    if isinstance(kept_size, Whole):
        sizes |= {other: kept_size for other in range(-len(shape), 0) if other != contracting}
    elif kept_size != 1:
        if len(shape) < 2:
            raise ValueError(
                f"quantize: format={format.name} has two-dimensional blocks={format.block} and "
                f"needs at least two axes, got shape={shape}"
            )
        sizes[contracting + (1 if contracting == -len(shape) else -1)] = kept_size
    return tuple(sorted(sizes.items()))


def check_key(key: object, spec: OperandSpec, operation: str) -> None:
    """Raise unless a key is there exactly when a cast draws random bits."""
    if not spec.random_bits:
        if key is not None:
            raise ValueError(
                f"{operation}: a key is for stochastic rounding only, got "
                f"rounding={spec.rounding.name!r} and a key; drop the key or use "
                "rounding='stochastic'"
            )
        return
    if key is None:
        raise ValueError(
            f"{operation}: stochastic rounding needs a key, got key=None; "
            "pass key=jax.random.key(seed)"
        )
    check_is_key(key, operation)


def check_is_key(key: object, operation: str) -> None:
    """Raise TypeError unless key is one PRNG key, typed, raw or derived."""
    if isinstance(key, DerivedKey):
        return
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    if dtype is not None:
        if jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ():
            return
        if dtype == jnp.uint32 and shape is not None and len(shape) == 1:
            return
    described = f"dtype={dtype}, shape={shape}" if dtype is not None else f"{key!r}"
    raise TypeError(
        f"{operation}: key must be one PRNG key from jax.random.key or jax.random.PRNGKey, "
        f"got {described}"
    )


def as_axis(axis: object, operation: str, name: str = "axis") -> int:
    """An axis as an int; TypeError for what is no integer, which int() would cut down to one."""
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer):
        raise TypeError(
            f"{operation}: {name} must be an int, got {name}={axis!r}; count axes from 0, or from "
            "the end with -1"
        )
    return int(axis)


def as_axes(axes: object, operation: str, name: str) -> tuple[int, ...]:
    """A sequence of axes as ints."""
    if not isinstance(axes, Sequence) or isinstance(axes, str):
        raise TypeError(
            f"{operation}: {name} must be a sequence of ints, got {name}={axes!r}; e.g. (-1, -2)"
        )
    return tuple(as_axis(axis, operation, name) for axis in axes)


def check_tensor_scale(
    tensor_scale: jax.typing.ArrayLike | None,
    format: BlockFormat,
    shape: tuple[int, ...],
    blocks: Blocks,
) -> jax.Array | None:
    """A given tensor scale as float32 with an axis for each of x's; a traced invalid one as NaN."""
    if tensor_scale is None:
        return None
    if not format.tensor_scale:
        raise ValueError(
            f"quantize: format={format.name} has no tensor scale, got tensor_scale; drop it"
        )
    scale = jnp.asarray(tensor_scale, jnp.float32)
    if scale.size == 1 and scale.ndim < len(shape):
        scale = scale.reshape((1,) * len(shape))
    reason = tensor_scale_violation(scale.shape, shape, blocks)
    last = max((axis for axis, length in enumerate(scale.shape) if length != 1), default=0)
    if any(scale.shape[axis] == 1 != shape[axis] for axis in range(last)):
        reason = (
            "a tensor scale belongs to the whole tensor, or to each position of its first axes, "
            f"got tensor_scale.shape={scale.shape}, shape={shape}"
        )
    if reason is not None:
        raise ValueError(f"quantize: {reason}; pass one number, or one for each matrix of a batch")
    # By its bits: XLA takes subnormals for zeros when it compares.
    bits = float32.float32_bits(scale)
    valid = (bits > 0) & (bits < float32.INF)
    if not isinstance(valid, Tracer) and not bool(valid.all()):
        raise ValueError(
            f"quantize: tensor_scale must be finite and positive, got tensor_scale={tensor_scale}; "
            "leave it out, and it is computed"
        )
    return jnp.where(valid, scale, jnp.float32(jnp.nan))


Key = jax.Array | DerivedKey | None


def draw_bits(key: jax.Array | DerivedKey, shape: tuple[int, ...], width: int) -> jax.Array:
    """`reference.random_bits.draw_bits`: random integers of so many bits, by key and shape."""
    of = DerivedKey.of(key)
    return bind(RandomBitsCall.of(of, shape, width), of)


def check_matmul_key(key: Key, recipe: MatmulRecipe) -> Key:
    """The key that a product takes: None if its recipe draws nothing, whatever was given."""
    # The gradients' own need is only known when they are taken: see `product_key`.
    if key is not None:
        check_is_key(key, "dot_general")
    elif recipe.output.is_stochastic:
        raise ValueError(
            f"dot_general: recipe {recipe.name!r} rounds stochastically and needs a key, got "
            "key=None; pass key=jax.random.key(seed)"
        )
    return key if recipe.is_stochastic else None
