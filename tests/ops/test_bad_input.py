"""Errors of products: values and the remedy in each message. Empty arrays work."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mx_jax
from mx_jax import recipes
from mx_jax.ops.dot_general import RecipeDotGeneral
from tests.ops.calls import CALLS
from tests.quick import quick, with_gradients

MXFP8 = recipes.mxfp8()
X, W = np.ones((2, 40), np.float32), np.ones((40, 3), np.float32)


@pytest.mark.parametrize(
    ("lhs", "rhs", "side", "dtype"),
    [
        (X.astype(np.int32), W, "lhs", "int32"),
        (X, W.astype(np.complex64), "rhs", "complex64"),
        (X, W.astype(np.float64), "rhs", "float64"),
        (X > 0, W, "lhs", "bool"),
        (X.tolist(), W.astype(int), "rhs", "int64"),
    ],
    ids=["int", "complex", "float64", "bool", "list"],
)
def test_dtypes(lhs: Any, rhs: Any, side: str, dtype: str):
    message = (
        f"{side} must be float32, bfloat16, float16 or an MXArray, got dtype={dtype}, "
        f"shape={np.shape(lhs if side == 'lhs' else rhs)}; convert it first, e.g. "
        f"{side}.astype(jnp.float32)"
    )
    for operation in ("matmul", "einsum", "dot_general"):
        with pytest.raises(TypeError, match=re.escape(f"{operation}: {message}")):
            CALLS[operation](lhs, rhs, recipe=MXFP8)


def test_high_precision_takes_what_lax_takes():
    x, w = X.astype(np.int32), W.astype(np.int32)
    product = mx_jax.matmul(x, w, recipe=recipes.high_precision())
    assert product.dtype == jnp.int32 and np.all(np.asarray(product) == 40)


@pytest.mark.parametrize(
    ("recipe", "hint"),
    [
        (recipes.mxfp8, "(call it: recipes are functions), got recipe=<function mxfp8"),
        (3, "(e.g. mx_jax.recipes.mxfp8()), got recipe=3; or the name of one: high_precision"),
        (None, "(e.g. mx_jax.recipes.mxfp8()), got recipe=None"),
        (MXFP8.output, "(e.g. mx_jax.recipes.mxfp8()), got recipe=MatmulSpec("),
    ],
    ids=["function", "number", "none", "spec"],
)
def test_recipes(recipe: Any, hint: str):
    for operation, call in (
        *((name, functools.partial(call, X, W, recipe=recipe)) for name, call in CALLS.items()),
        ("explain", lambda: mx_jax.inspect.explain(recipe, 8, 32, 8)),
        ("RecipeDotGeneral", lambda: RecipeDotGeneral(recipe=recipe)),
        ("Dense", lambda: mx_jax.nn.linen.Dense(8, recipe=recipe)),
        ("Einsum", lambda: mx_jax.nn.linen.Einsum((8,), recipe=recipe)),
        ("Linear", lambda: mx_jax.nn.nnx.Linear(8, 8, recipe=recipe, rngs=nnx.Rngs(0))),
        ("Einsum", lambda: mx_jax.nn.nnx.Einsum("k,k->", (8,), recipe=recipe, rngs=nnx.Rngs(0))),
    ):
        message = re.escape(f"{operation}: recipe must be a Recipe {hint}")
        with pytest.raises(TypeError, match=f"^{message}"):
            call()


# Shapes, dimension numbers, and what is said of them.
DIMENSIONS = {
    "contracting": (
        *((2, 40), (41, 3), (((1,), (0,)), ((), ()))),
        "contracting sizes must agree, got lhs.shape=(2, 40) with contracting axes (1,) of sizes "
        "(40,) and rhs.shape=(41, 3) with contracting axes (0,) of sizes (41,)",
    ),
    "batch": (
        *((4, 2, 40), (5, 40, 3), (((2,), (1,)), ((0,), (0,)))),
        "batch sizes must agree, got lhs.shape=(4, 2, 40) with batch axes (0,) of sizes (4,) and "
        "rhs.shape=(5, 40, 3) with batch axes (0,) of sizes (5,)",
    ),
    "count": (
        *((2, 40), (2, 40), (((1, 0), (1,)), ((), ()))),
        "contracting sizes must agree, got lhs.shape=(2, 40) with contracting axes (1, 0)",
    ),
    "range": (
        *((2, 40), (40, 3), (((2,), (0,)), ((), ()))),
        "axis=2 is out of range for lhs of shape=(2, 40)",
    ),
    "negative range": (
        *((2, 40), (40, 3), (((1,), (-3,)), ((), ()))),
        "axis=-3 is out of range for rhs of shape=(40, 3)",
    ),
    "twice": (
        *((40, 40), (40, 40), (((1, -1), (0, 1)), ((), ()))),
        "each axis of lhs may appear once, got contracting=(1, 1) and batch=()",
    ),
    "batch and contracting": (
        *((40, 40), (40, 40), (((1,), (1,)), ((0,), (1,)))),
        "each axis of rhs may appear once, got contracting=(1,) and batch=(1,)",
    ),
}


@pytest.mark.parametrize(
    ("lhs", "rhs", "dimensions", "message"), DIMENSIONS.values(), ids=DIMENSIONS
)
def test_dimension_numbers(lhs, rhs, dimensions, message: str):
    left, right = np.ones(lhs, np.float32), np.ones(rhs, np.float32)
    with pytest.raises(ValueError, match=f"^dot_general: {re.escape(message)}"):
        mx_jax.dot_general(left, right, dimensions, recipe=MXFP8)


SHAPE = "must be ((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)), each a sequence"


@pytest.mark.parametrize(
    ("dimensions", "error", "message"),
    [
        (((1,), (0,)), ValueError, SHAPE),
        ((1, 0), ValueError, SHAPE),
        (((1, 0), ((), ())), ValueError, SHAPE),
        ((((1,), (0,)), ((), ()), ()), ValueError, SHAPE),
        (None, ValueError, SHAPE),
        ("mk,kn", ValueError, SHAPE),
        ((((1.5,), (0,)), ((), ())), TypeError, "axes must be integers, got dimension_numbers="),
        ((("k", "k"), ("", "")), TypeError, "axes must be integers, got dimension_numbers="),
    ],
    ids=str,
)
def test_depth_of_dimension_numbers(dimensions, error, message: str):
    for recipe in (MXFP8, recipes.high_precision()):
        with pytest.raises(error, match=f"^dot_general: .*{re.escape(message)}"):
            mx_jax.dot_general(X, W, dimensions, recipe=recipe)


CALL = pytest.mark.parametrize("operation", CALLS)


@CALL
@pytest.mark.parametrize(
    ("x", "message"),
    [
        ("abc", "must be an array of numbers or an MXArray, got lhs of type str; pass"),
        (None, "must be an array of numbers or an MXArray, got lhs of type NoneType"),
        ({"w": 1}, "must be an array of numbers or an MXArray, got lhs of type dict"),
        (np.array(["a"]), "got lhs of type ndarray of dtype=<U1"),
        (np.array([object()]), "got lhs of type ndarray of dtype=object"),
        (
            X.astype(">f4"),
            "must have this machine's byte order, got dtype=>f4, shape=(2, 40); convert it first, "
            "e.g. lhs.astype(lhs.dtype.newbyteorder('='))",
        ),
    ],
    ids=["text", "none", "dict", "texts", "objects", "big_endian"],
)
def test_what_is_no_array(operation: str, x, message: str):
    for recipe in (MXFP8, recipes.high_precision()):
        with pytest.raises(TypeError, match=f"^{operation}: lhs .*{re.escape(message)}"):
            CALLS[operation](x, W, recipe=recipe)
    # The remedy is one.
    if isinstance(x, np.ndarray) and x.dtype.kind == "f":
        mx_jax.matmul(x.astype(x.dtype.newbyteorder("=")), W, recipe=MXFP8)


@pytest.mark.parametrize("precision", ["foo", 7])
def test_precision(precision: Any):
    ragged = functools.partial(mx_jax.ragged_dot, group_sizes=np.array([2]))
    for product, w in ((mx_jax.matmul, W), (ragged, W[None])):
        with pytest.raises(
            ValueError, match=r"(?s)(ragged_dot|dot_general): Precision .* got prec"
        ):
            product(X, w, recipe=MXFP8, precision=precision)


def test_errors_of_tracers_are_jax_s():
    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.jit(lambda x: mx_jax.matmul(ToNumpy(x), W, recipe=MXFP8))(X)


class ToNumpy:
    """Something that only NumPy can make an array of."""

    def __init__(self, x):
        self.x = x

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.x)


@CALL
@pytest.mark.parametrize("dtype", [jnp.int32, np.uint8, jnp.complex64, bool], ids=str)
def test_products_of_quantized_operands_are_floating_point(operation: str, dtype):
    message = (
        f"{operation}: the product of quantized operands is floating point, got "
        f"preferred_element_type={jnp.dtype(dtype).name}; use float32, bfloat16 or float16"
    )
    stored, high = mx_jax.quantize(W, "mxfp4", axis=0), recipes.high_precision()
    for w, recipe in ((W, MXFP8), (W, recipes.weight_only("mxfp4")), (stored, high)):
        with pytest.raises(TypeError, match=f"^{message}"):
            CALLS[operation](X, w, recipe=recipe, preferred_element_type=dtype)


@pytest.mark.parametrize("subscripts", [None, 3, ["mk,kn->mn"], b"mk,kn->mn"], ids=repr)
def test_subscripts_are_text(subscripts):
    message = f"einsum: subscripts must be a string such as 'mk,kn->mn', got {subscripts=}"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        mx_jax.einsum(subscripts, X, W, recipe=MXFP8)


@pytest.mark.slow(but=r"40, 3|nvfp4-\(2")
@pytest.mark.parametrize(
    ("name", "lhs", "rhs"),
    [
        ("mxfp4", (0, 40), (40, 3)),
        ("int8_rowwise", (0, 40), (40, 3)),
        ("mxfp4", (2, 40), (40, 0)),
        ("nvfp4", (2, 0), (0, 3)),
        ("nvfp4", (0, 0), (0, 0)),
    ],
    ids=str,
)
def test_empty_operands(name: str, lhs, rhs):
    shapes = lhs, rhs, (lhs[0], rhs[1])
    multiply = functools.partial(mx_jax.matmul, recipe=name)
    results = quick(with_gradients(multiply))(*(np.ones(shape, np.float32) for shape in shapes))
    assert [result.shape for result in results] == [shapes[2], lhs, rhs]
    assert not any(map(np.any, results))
