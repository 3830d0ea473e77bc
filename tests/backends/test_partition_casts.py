"""Casts in programs of several devices: on CPUs parts in C++, one device's bits, no value moved."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import mx_jax
from mx_jax.backends.calls import QuantizeCall
from mx_jax.backends.partition import can_split
from mx_jax.backends.target import Target
from mx_jax.codecs.rounding import NEAREST
from mx_jax.formats import MXFP4
from mx_jax.ops.product import transformed
from mx_jax.recipes import Hadamard
from mx_jax.reference.scale_rules import power_of_two
from mx_jax.testing.cases import QuantizeCase
from mx_jax.testing.compare import assert_bitwise_equal
from tests.needs import needs_library
from tests.quick import lowered, with_gradients
from tests.sharding.collectives import collectives, mesh_of

P = PartitionSpec
CPU = Target(platform="cpu")
pytestmark = needs_library
FORMATS = (
    *("mxfp8", "mxfp4", "nvfp4", "float8_rowwise_e4m3", "float8_tensorwise_e4m3"),
    *("mxfp4_2d", "nvfp4_2d"),
)
# Whole blocks a device; eight values of a block; both axes; what nobody splits.
SPECS = (P("a"), P(("a", "b")), P(None, ("a", "b")), P("a", "b"), P())


# Every split of one format, and of the others those that cut blocks along either axis.
@pytest.mark.slow(but=r"P\(\('a', 'b'\),?\)")
@pytest.mark.parametrize(
    ("name", "spec"),
    [(FORMATS[0], spec) for spec in SPECS]
    + [(name, spec) for name in FORMATS[1:] for spec in SPECS[1:3]],
    ids=str,
)
@pytest.mark.parametrize("axis", [0, 1])
def test_parts_are_those_of_one_device(
    name: str, axis: int, spec: PartitionSpec, rng: np.random.Generator
):
    mesh = mesh_of(a=4, b=2)
    x = rng.normal(size=(64, 64)) * np.exp2(rng.integers(-8, 8, size=(64, 64)))
    x = jnp.asarray(x, jnp.bfloat16)
    run = jax.jit(lambda x: mx_jax.quantize(x, name, axis=axis))
    expected, placed = run(x), jax.device_put(x, NamedSharding(mesh, spec))
    program = run.lower(placed).compile()
    jax.tree.map(assert_bitwise_equal, program(placed), expected)
    text = program.as_text() or ""
    assert '"mx_jax_cpu_quantize"' in text
    # Scales of blocks that devices share may be gathered to be handed out.
    moved = [exchange for exchange in collectives(text) if exchange.kind != "all-reduce"]
    assert all(exchange.dtype != "bf16" and exchange.nbytes <= x.size // 8 for exchange in moved)


DRAWN: dict[str, Any] = {"rounding": "stochastic", "key": jax.random.key(0)}
OTHER_WAYS: dict[str, dict[str, Any]] = {
    "mxfp4": {"format": "mxfp4", "scale_rule": "rceil", **DRAWN},
    "nvfp4": {"format": "nvfp4", **DRAWN},
    "four_over_six": {"format": "nvfp4", "scale_rule": "four_over_six"},
}


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_shared_blocks_in_other_ways(way: str, rng: np.random.Generator):
    """Each value rounds by its own bits, wherever its block's neighbours are; scales that are no
    function of the maximum alone see whole blocks, whose values are gathered."""
    mesh = mesh_of(a=8)
    x = jnp.asarray(rng.normal(size=(64, 64)), jnp.float32)
    run = jax.jit(lambda x: mx_jax.quantize(x, axis=0, **OTHER_WAYS[way]))
    actual = run(jax.device_put(x, NamedSharding(mesh, P("a"))))
    jax.tree.map(assert_bitwise_equal, actual, run(x))


def test_drawn_signs_are_those_of_one_device(rng: np.random.Generator):
    """Sums are added in another order than in C++."""
    x, random = jnp.asarray(rng.normal(size=(64, 64)), jnp.float32), Hadamard(size=16, signs=None)
    run = jax.jit(lambda x: transformed(x, random, DRAWN["key"], 1))
    actual = run(jax.device_put(x, NamedSharding(mesh_of(a=8), P("a"))))
    np.testing.assert_allclose(actual, run(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize(("name", "number"), [("mxfp8", 9), ("nvfp4", 7)])
def test_casts_and_products_of_accelerators_too(name: str, number: int, platform: str):
    """In plain JAX: left to XLA, shards that cut blocks would pass their values to each other.
    Equal casts are one function.

    TPUs have no custom partitioning (`tests/tpu` compiles).
    """
    mesh = mesh_of(a=8)
    x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P("a")))

    def step(x: jax.Array) -> Any:
        product = with_gradients(functools.partial(mx_jax.matmul, recipe=name))(x, x, x)
        return product, mx_jax.quantize_both(x, name)

    program = lowered(step, x, platform=platform)
    expected = 0 if platform == "tpu" else number
    assert program.count("@CustomSPMDPartitioning") == expected


def test_handlers_are_of_cpus():
    """Weights that were packed for CPUs reach no other platform: JAX names the primitive."""
    pack = lambda w: mx_jax.pack_weights(mx_jax.quantize(w, "mxfp4", axis=0))  # noqa: E731
    with pytest.raises(NotImplementedError, match=r"mx_cpu_ffi.* not found for platform tpu"):
        lowered(pack, jax.ShapeDtypeStruct((64, 64), jnp.bfloat16), platform="tpu")


def test_only_numbers_of_the_library_are_split():
    """Names tell programs apart in a compilation cache; a rule of others may look at all blocks."""
    call = QuantizeCase(format=MXFP4, shape=(64, 64)).call
    assert isinstance(call, QuantizeCall) and can_split(call, CPU)
    assert not can_split(call, Target(platform="tpu"))
    element = dataclasses.replace(MXFP4.element, bias=2)
    for change in (
        {"scale_rule": power_of_two("mine", lambda element: 1 << 22)},
        {"rounding": dataclasses.replace(NEAREST, name="mine")},
        {"format": dataclasses.replace(MXFP4, element=element)},
    ):
        assert not can_split(dataclasses.replace(call, **change), CPU)
