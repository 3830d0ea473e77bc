"""Products on automatic axes: what the compiler moves by itself are codes, and no more than lax."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import mx_jax
from mx_jax import recipes
from mx_jax.backends.cpu_ffi import library, products
from mx_jax.backends.xla import XLA
from mx_jax.formats import INT8_ROWWISE
from mx_jax.testing.cases import MatmulCase
from mx_jax.testing.compare import assert_bitwise_equal
from tests.quick import OPTIONS, quick, with_gradients
from tests.sharding.collectives import (
    check,
    collectives,
    compiled,
    draw_all,
    gathered,
    mesh_of,
    place,
)

P = PartitionSpec
DIMENSIONS = (((1,), (0,)), ((), ()))
TOKENS, FEATURES, UNITS = 256, 256, 128
WEIGHTS = FEATURES * UNITS
MXFP4 = recipes.mxfp4()
FSDP = P("fsdp", None), P("fsdp", None), P("fsdp", None)

ARRAYS = draw_all((TOKENS, FEATURES), (FEATURES, UNITS), (TOKENS, UNITS))


@pytest.fixture(scope="module")
def expected() -> Any:
    """Of one device, by MXFP4."""
    return quick(step(MXFP4))(*ARRAYS)


def step(recipe: Any) -> Any:
    """A product and its gradients, by a recipe or by lax."""

    def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
        if recipe is None:
            return lax.dot_general(x, w, DIMENSIONS)
        return mx_jax.dot_general(x, w, DIMENSIONS, recipe=recipe)

    return with_gradients(multiply)


LAYOUTS = {
    "FSDP on k": FSDP,
    "FSDP on n": (P("fsdp"), P(None, "fsdp"), P("fsdp")),
    "tensor, column": (P(), P(None, "model"), P(None, "model")),
    "tensor, row": (P(None, "model"), P("model"), P()),
    "both": (P("fsdp"), P("fsdp", "model"), P("fsdp", "model")),
    "sequence, column": (P("model"), P(None, "model"), P(None, "model")),
    "along two axes": (P(("fsdp", "model")), P(("fsdp", "model")), P(("fsdp", "model"))),
}
# Bytes of codes and scales in both orientations, of which a device has this part.
BOTH = WEIGHTS + 2 * WEIGHTS // 32
WANTED = {
    "FSDP on k": BOTH,
    "FSDP on n": BOTH,
    "both": BOTH // 2,
    # The input for the product, and for the kernel's gradient.
    "sequence, column": TOKENS * FEATURES + 2 * TOKENS * FEATURES // 32,
    "along two axes": BOTH,
}


@pytest.mark.slow(but="FSDP|tensor, row|both")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, mesh: Mesh, expected: Any):
    x, w, g = LAYOUTS[layout]
    text, actual = compiled(step(MXFP4), mesh, ARRAYS, (x, w, g), (g, x, w))
    check(actual, expected)
    assert gathered(text) == gathered(text, "u8") == WANTED.get(layout, 0)


def test_integers(mesh: Mesh):
    """One scale is the whole row's, wherever its parts lie: codes are one device's, and sums in
    int32 exact. Each of at most 4 parts is scaled by two factors, and then they are added up."""
    # Parts of k, and at once parts of the rows and columns that gradients contract.
    layouts = LAYOUTS["tensor, row"], LAYOUTS["both"]
    rng, run = np.random.default_rng(0), step("int8_rowwise")
    shapes = (TOKENS, FEATURES), (FEATURES, UNITS), (TOKENS, UNITS)
    arrays = [(rng.normal(size=s) * 2.0 ** rng.integers(-9, 9, s)).astype("f4") for s in shapes]
    bounds = [8 * 2.0**-24 * magnitude for magnitude in quick(run)(*map(abs, arrays))]
    wanted = quick(run)(*arrays)
    for x, w, g in layouts:
        _, actual = compiled(run, mesh, arrays, (x, w, g), (g, x, w))
        for one, other, bound in zip(actual, wanted, bounds, strict=True):
            assert (abs(one - other) <= bound).all(), (x, w, g)
    # Split by XLA, as on TPUs.
    call = MatmulCase(lhs=INT8_ROWWISE, rhs=INT8_ROWWISE, m=(8,), n=(8,), k=(FEATURES,)).call
    dot = lambda *xs: XLA.run(call, *(mx_jax.quantize(x, INT8_ROWWISE) for x in xs))  # noqa: E731
    rows = arrays[0][:8], arrays[0][8:16]
    text, product = compiled(dot, mesh, rows, (P(None, "fsdp"),) * 2)
    assert re.search(r"= s32.* all-reduce", text)
    assert_bitwise_equal(product, quick(dot)(*rows))


# Rows of the smaller operand of what a device has of the product and of its gradients.
ROWS = {"FSDP on k": (64, 64, 128), "sequence, column": (64, 256, 64)}


@pytest.mark.parametrize("layout", ROWS)
def test_no_mesh_need_be_in_context(layout: str, mesh: Mesh, expected: Any):
    """Sharded arguments say what a mesh in context says: codes move, and each part runs in C++."""
    specs = LAYOUTS[layout]
    wanted = tuple(NamedSharding(mesh, specs[number]) for number in (2, 0, 1))
    programs = []
    for recipe in (MXFP4, None):
        operands = place(mesh, ARRAYS, specs)
        jitted = jax.jit(step(recipe), out_shardings=wanted, compiler_options=OPTIONS)
        program = jitted.lower(*operands).compile()
        programs.append((program.as_text(), program(*operands)))
    (text, actual), (theirs, _) = programs
    assert gathered(text) == gathered(text, "u8") > 0
    assert total(text) < 0.35 * total(theirs)
    check(actual, expected)
    if not isinstance(loaded := library.load(), str):
        assert "mx_jax_cpu_quantize" in text
        # Of integers any number of rows.
        limit = 2**31 if products._FAST.get(loaded.isa) else products.FLOAT32_ROWS[loaded.isa]
        kernels = sum(rows <= limit for rows in ROWS[layout])
        assert text.count('custom_call_target="mx_jax_cpu_matmul"') == kernels


def total(program: str) -> int:
    return sum(exchange.nbytes for exchange in collectives(program))


def test_nothing_says_where_the_product_lies(mesh: Mesh, expected: Any):
    """Then it lies as lax's would."""
    specs = P("fsdp"), P("fsdp", "model"), P("fsdp")
    text, actual = compiled(step(MXFP4), mesh, ARRAYS, specs)
    _, theirs = compiled(step(None), mesh, ARRAYS, specs)
    check(actual, expected)
    assert [a.sharding.spec for a in actual] == [a.sharding.spec for a in theirs]
    assert not [c for c in collectives(text) if c.kind == "all-gather" and c.dtype != "u8"]


def test_one_maximum_for_the_tensor_scales_of_all_weights(mesh: Mesh):
    """float8 by tensors: no layer waits for the maximum of its own kernel."""
    recipe = recipes.weight_only("float8_tensorwise_e4m3")

    def layers(x: jax.Array, *kernels: jax.Array) -> jax.Array:
        for w in kernels:
            x = jnp.tanh(mx_jax.matmul(x, w, recipe=recipe))
        return x

    square = ARRAYS[0][:FEATURES]
    operands, specs = (ARRAYS[0], square, 2 * square, 3 * square), (P("fsdp"),) * 4
    text, _ = compiled(layers, mesh, operands, specs)
    maxima = re.findall(r"= (\(.*?\)|\S+) all-reduce\(", text)
    assert [len(re.findall(r"\w\[", kind)) for kind in maxima] == [3], maxima


def test_axes_cut_in_two():
    """A reshape leaves a part of a mesh axis to each of two axes: no mesh says that."""
    mesh = mesh_of(data=8)
    x, w, _ = ARRAYS

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        y = mx_jax.matmul(x.reshape(2, TOKENS // 2, FEATURES), w, recipe=MXFP4)
        return y.reshape(TOKENS, UNITS)

    text, actual = compiled(run, mesh, (x, w), (P("data"), P("data")))
    assert gathered(text) == gathered(text, "u8") == BOTH // 2
    check([actual], [quick(run)(x, w)])


# Which operands are stacked, where they lie, and how many weights' codes and scales move.
BATCHES = {
    "one weight": ((0, None), P(None, "fsdp"), P("fsdp"), 2),
    "a weight each": ((0, 0), P(None, "fsdp"), P(None, "fsdp"), 6),
    "one input": ((None, 0), P("fsdp"), P(None, "fsdp"), 6),
}


def stacked(array: np.ndarray, axis: int | None) -> np.ndarray:
    return array if axis is None else np.stack([array, -array, 2 * array], axis)


@pytest.mark.parametrize("case", BATCHES)
def test_codes_move_under_vmap(case: str, mesh: Mesh):
    axes, lhs, rhs, moved = BATCHES[case]
    operands = [*map(stacked, ARRAYS, (*axes, 0))]
    run = with_gradients(jax.vmap(functools.partial(mx_jax.matmul, recipe=MXFP4), axes))
    out = P(None, "fsdp")
    text, actual = compiled(run, mesh, operands, (lhs, rhs, out), (out, lhs, rhs))
    assert gathered(text, "u8") == gathered(text) == moved * WEIGHTS * 17 // 32
    with mx_jax.only_backend("reference"):
        expected = quick(run)(*operands)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (2, 3)], ids=str)
def test_batches_of_batches(axes: tuple[int | None, int | None], mesh: Mesh):
    """Operands that hold their contracted axes first, in products with a batch."""
    x, w = map(stacked, draw_all((2, 128, 128), (2, 128, 32)), axes)
    numbers = (((1,), (1,)), ((0,), (0,)))
    run = jax.vmap(lambda x, w: mx_jax.dot_general(x, w, numbers, recipe=MXFP4), axes)
    expected = run(x, w)
    with jax.set_mesh(mesh):
        assert_bitwise_equal(quick(run)(x, w), expected)


def test_under_a_loop_of_remat(mesh: Mesh):
    x, w, _ = ARRAYS
    inner = jax.checkpoint(lambda x, w: mx_jax.matmul(x, w, recipe=MXFP4))

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        y = lax.map(lambda x: inner(x, w), x.reshape(2, -1, FEATURES))
        return jnp.sum(y * y) / TOKENS

    run = jax.grad(loss, (0, 1))
    _, actual = compiled(run, mesh, (x, w), FSDP[:2])
    for one, other in zip(actual, quick(run)(x, w), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())


def test_second_derivatives(mesh: Mesh):
    """A kernel in high precision has a gradient that depends on it."""
    recipe = recipes.weight_only("mxfp4")
    x, w, _ = ARRAYS
    stored = mx_jax.quantize(w, "mxfp4", axis=0)
    run = jax.grad(lambda x: jnp.sum(jnp.tanh(mx_jax.matmul(x, stored, recipe=recipe))))
    second = jax.grad(lambda x: jnp.vdot(run(x), x))
    _, actual = compiled(second, mesh, (x / 64,), (P("fsdp"),))
    expected = quick(second)(x / 64)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_programs_that_compute_otherwise_differ(mesh: Mesh):
    """The key of a compilation cache may leave out the number of a rule, and sees shapes alone."""
    x, w, _ = ARRAYS

    def text(format: str) -> str:
        run = jax.jit(lambda x, w: mx_jax.matmul(x, w, recipe=recipes.weight_only(format)))
        with jax.set_mesh(mesh):
            lowered = run.lower(x, mx_jax.quantize(w, format, axis=0)).as_text()
        return re.sub(r'backend_config = "\d+"', "", lowered)

    assert text("mxfp6_e2m3") == text("mxfp6_e2m3") != text("mxfp6_e3m2")


EXPLICIT = {
    "tensor, column": (P(), P(None, "model"), P(None, "model")),
    "FSDP": (P("fsdp"), P("fsdp"), P("fsdp")),
}


@pytest.mark.parametrize("layout", EXPLICIT)
def test_an_explicit_mesh_that_is_not_in_context(layout: str, expected: Any):
    """Operands' types say where the product and its gradients are, as they do of lax's."""
    mesh = mesh_of(AxisType.Explicit)
    operands = place(mesh, ARRAYS, EXPLICIT[layout])
    lies = operands[2].sharding

    def run(multiply: Any) -> Any:
        step = with_gradients(lambda x, w: multiply(x, w, DIMENSIONS, out_sharding=lies))
        compiled = jax.jit(step, compiler_options=OPTIONS).lower(*operands).compile()
        return compiled.as_text(), compiled(*operands)

    text, actual = run(
        lambda *operands, **named: mx_jax.dot_general(*operands, recipe=MXFP4, **named)
    )
    theirs, plain = run(lax.dot_general)
    assert [x.sharding.spec for x in actual] == [x.sharding.spec for x in plain]
    assert total(text) <= total(theirs)
    check(actual, expected)
    product = mx_jax.matmul(*operands[:2], recipe=MXFP4, out_sharding=lies)
    assert product.sharding.is_equivalent_to(lies, 2)
    check([product], actual[:1])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_shard_map_over_a_part_of_the_axes(kind: AxisType, expected: Any):
    """Axes that are not in `axis_names` stay the compiler's, or types': it moves no more there."""
    mesh = mesh_of(kind)
    specs = P("fsdp"), P(None, "model"), P("fsdp", "model")
    outer = P("fsdp"), P(), P("fsdp")
    programs = []
    for recipe in (MXFP4, None):
        run = jax.shard_map(
            step(recipe), in_specs=outer, out_specs=(outer[2], *outer[:2]), axis_names={"fsdp"}
        )
        programs.append(compiled(run, mesh, ARRAYS, specs, (specs[2], *specs[:2])))
    (text, actual), (theirs, _) = programs
    # On explicit axes JAX 0.10 moves an array of the input's size once more.
    is_older = jax.__version_info__ < (0, 11) and kind is AxisType.Explicit
    assert total(text) <= total(theirs) + is_older * 4 * FEATURES * TOKENS // 4
    check(actual, expected)
