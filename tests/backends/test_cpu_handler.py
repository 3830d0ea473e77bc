"""The handlers' axes, and what follows from them: batches, shards, packed weights' too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import mx_jax
from mx_jax import recipes
from mx_jax.backends.cpu_ffi import handler
from mx_jax.backends.cpu_ffi.handler import Geometry
from mx_jax.testing.compare import assert_bitwise_equal
from tests.needs import needs_library

P = PartitionSpec


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape), jnp.float32)


# Axes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "shapes", "sizes", "results", "merged"),
    [
        ("*b k -> *b k/32, *b k/k", [(3, 70)], {}, [(3, 3), (3, 1)], [(3, 3), (3, 1)]),
        # Batches of one length and of length one; axes as one, an empty group among them.
        (
            "*l (m0 m1) k, *r () k, *lr -> *lr (m0 m1) ()",
            [(1, 2, 5, 64), (4, 64), (4,)],
            {},
            [(4, 2, 5)],
            [(4, 10, 1)],
        ),
        # What an operand only has in blocks, or not at all, is told.
        ("*r n/32 1 -> *r n p", [(2, 1)], {"n": 40, "p": 9}, [(40, 9)], [(40, 9)]),
    ],
)
def test_results_follow(axes, shapes, sizes, results, merged):
    geometry = Geometry(axes, tuple(shapes), sizes)
    assert geometry.result_shapes() == list(zip(merged, results, strict=True))


def test_several_axes_become_one_in_whole_blocks():
    geometry = Geometry("*b (j k), *b (j k/32) -> *b", ((2, 40), (2, 2)), {})
    filled, scales = geometry.merge([jnp.ones((2, 40)), jnp.ones((2, 2))])
    assert scales.shape == (4,)
    assert filled.shape == (128,)
    assert_bitwise_equal(filled, np.repeat([1.0, 0.0, 1.0, 0.0], [40, 24, 40, 24]).astype("f"))


@pytest.mark.parametrize(
    ("axes", "shapes", "expected", "whole", "sizes"),
    [
        # Blocks stay whole; an axis that ends within one is not split at all.
        (
            "*b j k -> *b j k, *b j k/32",
            [(8, 4, 64)],
            "batch0 j (k k_inside) -> batch0 j (k k_inside), batch0 j k",
            ["k_inside"],
            {"k_inside": 32},
        ),
        ("*b k -> *b k, *b k/32", [(40,)], "k_inside -> k_inside, k", ["k_inside", "k"], {}),
        # What is contracted is gathered, and what stands for a whole batch.
        (
            "*l m k, *r n k -> *lr m n",
            [(1, 5, 64), (3, 7, 64)],
            "whole0 m whole_k, batch0 n whole_k -> batch0 m n",
            ["whole0", "whole_k"],
            {},
        ),
        (
            "*r n/32 bytes, 0 -> *r n",
            [(2, 99), (0,)],
            "n whole_bytes, whole2 -> (n n_inside)",
            ["whole_bytes", "whole2", "n_inside"],
            {"n_inside": 32},
        ),
    ],
)
def test_the_rule_for_devices_follows(axes, shapes, expected, whole, sizes):
    rule, options = handler._sharding_rule(Geometry(axes, tuple(shapes), {"n": 64, "bytes": 99}))
    assert (rule, options) == (expected, {"need_replication_factors": tuple(whole)} | sizes)


# Devices ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def place(array: jax.Array, mesh: Mesh, *parts: object) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh, P(*parts)))


def compiled(function, *args):
    """The results, and how often something is gathered for them."""
    program = jax.jit(function).lower(*args).compile()
    return program(*args), str(program.as_text()).count("all-gather(")


def product(x, w):
    return mx_jax.einsum("...tk,...kn->...tn", x, w, recipe=recipes.weight_only(w.format.name))


@pytest.mark.by_default("-2$")
@needs_library
@pytest.mark.usefixtures("insist")
@pytest.mark.parametrize(
    ("lhs", "rhs", "gathers"),
    [
        (("a",), (), 0),
        (("a",), ("b",), 0),
        ((), (("a", "b"),), 0),
        # k is gathered, of either operand.
        (("a", "b"), (None, "a"), 2),
    ],
    ids=str,
)
def test_packed_products_are_split(mesh: Mesh, lhs, rhs, gathers: int):
    x, packed = draw(16, 128), mx_jax.pack_weights(mx_jax.quantize(draw(128, 256), "nvfp4", axis=0))
    expected = jax.jit(product)(x, packed)
    split = jax.tree.map(lambda leaf: place(leaf, mesh, *rhs[: leaf.ndim]), packed)
    actual, found = compiled(product, place(x, mesh, *lhs), split)
    assert found == gathers
    wanted = P(*lhs[:1] or (None,), *(part for part in rhs[:1]))
    assert actual.sharding.is_equivalent_to(NamedSharding(mesh, wanted), 2)
    assert_bitwise_equal(actual, expected, what="product")


@needs_library
@pytest.mark.usefixtures("insist")
def test_packed_products_of_a_batch_are_split(mesh: Mesh):
    x, w = draw(8, 3, 64), mx_jax.quantize(draw(8, 64, 64), "mxfp4", axis=1)
    packed = mx_jax.pack_weights(w, num_batch=1)
    expected = jax.jit(product)(x, packed)
    split = jax.tree.map(lambda leaf: place(leaf, mesh, "a", "b"), packed)
    actual, gathers = compiled(product, place(x, mesh, "a"), split)
    assert gathers == 0
    assert actual.sharding.is_equivalent_to(NamedSharding(mesh, P("a", None, "b")), 3)
    assert_bitwise_equal(actual, expected, what="product")


@needs_library
@pytest.mark.usefixtures("insist")
@pytest.mark.parametrize(("kept", "panels"), [(256, P("a")), (80, P())])
def test_packing_is_split_between_panels(mesh: Mesh, kept: int, panels: PartitionSpec):
    w = mx_jax.quantize(draw(128, kept), "mxfp4", axis=0)
    expected = jax.tree.leaves(mx_jax.pack_weights(w))
    split = jax.tree.map(lambda leaf: place(leaf, mesh, None, "a"), w)
    (actual,), gathers = compiled(lambda w: jax.tree.leaves(mx_jax.pack_weights(w)), split)
    # Codes and scales, where a panel would be cut.
    assert gathers == (0 if panels else 2)
    assert actual.sharding.is_equivalent_to(NamedSharding(mesh, panels), 2)
    assert_bitwise_equal(actual, *expected, what="panels")


@needs_library
@pytest.mark.usefixtures("insist")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("check_vma", [False, True])
def test_below_shard_map_operands_may_vary_differently(mesh: Mesh, packed: bool, check_vma: bool):
    x, w = draw(16, 64), draw(64, 64)

    def local(x, w):
        kernel = mx_jax.quantize(w, "mxfp4", axis=0)
        return product(x, mx_jax.pack_weights(kernel) if packed else kernel)

    specs = (P("a"), P(None, "b"))
    run = jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=P("a", "b"), check_vma=check_vma
    )
    assert_bitwise_equal(jax.jit(run)(x, w), jax.jit(local)(x, w), what="product")


@needs_library
@pytest.mark.usefixtures("insist")
def test_shards_that_cut_blocks_are_gathered(mesh: Mesh):
    """Three blocks on four devices."""
    x = draw(8, 96)
    expected = mx_jax.quantize(x, "mxfp4")
    out = NamedSharding(mesh, P(None, "a"))
    cast = jax.jit(lambda x: mx_jax.quantize(x, "mxfp4").codes, out_shardings=out)
    assert_bitwise_equal(cast(place(x, mesh, None, "a")), expected.codes, what="codes")


@needs_library
def test_eager_calls_are_compiled_once_and_without_jit_too():
    w = draw(64, 8)
    pack = lambda: mx_jax.pack_weights(mx_jax.quantize(w, "mxfp4", axis=0))  # noqa: E731
    expected, compiled = pack(), handler._jitted.cache_info().misses
    with jax.disable_jit():
        found = pack()
    assert compiled and handler._jitted.cache_info().misses == compiled
    jax.tree.map(np.testing.assert_array_equal, found, expected)
