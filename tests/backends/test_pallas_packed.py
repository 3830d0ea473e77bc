"""Weights packed ahead of time for GPU kernels: products in the interpreter."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import formats, recipes
from mx_jax.backends.calls import Call, MatmulCall, OperandType, PackCall
from mx_jax.backends.pallas_gpu import backend_for, products
from mx_jax.backends.pallas_gpu.architecture import SM90, SM100, Architecture, Kernel
from mx_jax.backends.pallas_gpu.layouts import PackedWeights, meet
from mx_jax.backends.reference import REFERENCE
from mx_jax.backends.select import Choice
from mx_jax.backends.target import Target
from mx_jax.formats import MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4, BlockFormat
from mx_jax.mxarray import MXArray
from mx_jax.ops import dense
from mx_jax.ops import packing as ops_packing
from mx_jax.packed import PackedMXArray
from mx_jax.testing.cases import MatmulCase
from mx_jax.testing.compare import assert_bitwise_equal
from tests.backends.mosaic import interpreter, mostly_slow, needs_mosaic

pytestmark = needs_mosaic


def pack(
    architecture: Architecture, w: MXArray, call: MatmulCall, lhs: Any = None
) -> PackedMXArray:
    weights = OperandType.of(w, call.rhs.axes)
    packing = PackCall(weights=weights, blocks=w.blocks, lhs_format=lhs)
    backend = backend_for(architecture=architecture)
    target = Target(platform="cuda", compute_capability=architecture.capabilities[0])
    assert backend.rejects(packing, target) is None
    packed = backend.run(packing, w)
    assert isinstance(packed, PackedMXArray)
    assert packed.serves(call.rhs.axes.contracting, call.rhs.axes.batch)
    return packed


@pytest.mark.parametrize(
    "which",
    mostly_slow(
        [
            (SM90, None, MXFP8_E5M2),
            (SM90, MXFP4, MXFP4),
            (SM100, NVFP4, NVFP4),
        ],
        (SM90, None, MXFP8_E5M2),
        (SM100, NVFP4, NVFP4),
    ),
    ids=str,
)
def test_packed_weights_are_the_mxarray(
    which: tuple[Architecture, BlockFormat | None, BlockFormat], rng: np.random.Generator
):
    """Every code and scale, NaN among them, in any order of axes, stacked by vmap or not."""
    architecture, lhs, format = which
    facts: dict[str, Any] = {"batch": (2,), "m": (1,), "n": (5, 3), "k": (2, 64)}
    case = MatmulCase(lhs=None, rhs=format, dtype="bfloat16", rhs_k_first=True, **facts)
    _, w = case.operands(rng)
    assert isinstance(w, MXArray)
    codes = rng.integers(0, 2**format.element.bits, w.shape).astype(np.uint8)
    scales = rng.integers(0, 256, w.scales.shape).astype(np.uint8)
    w = dataclasses.replace(w, codes=jnp.asarray(codes), scales=jnp.asarray(scales))
    packed = pack(architecture, w, case.call, lhs)
    assert isinstance(packed.arrays, PackedWeights)
    assert (packed.shape, packed.blocks, packed.backend) == (w.shape, w.blocks, "pallas_gpu")
    for field in ("codes", "scales", "tensor_scale"):
        kept, given = (getattr(each, field) for each in (packed.unpack(), w))
        assert (kept is None) == (given is None)
        if given is not None:
            # A stack has a tensor scale for each of its matrices.
            assert_bitwise_equal(kept, jnp.broadcast_to(given, kept.shape), what=field)
    first = jax.tree.map(lambda leaf: leaf[0], packed)
    assert first.shape == w.shape[1:] and first.serves((0, 1), ())
    assert_bitwise_equal(first.unpack().codes, w.codes[0], what="codes of the first")
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), packed)
    assert stacked.shape == (2, *w.shape) and stacked.unpack().shape == (2, *w.shape)
    assert_bitwise_equal(stacked.unpack()[1].codes, w.codes, what="stacked codes")
    assert stacked.serves((2, 3), (0, 1)) and not stacked.serves((1, 2), (0,))


class Asked(Exception):
    """What would have multiplied."""


@pytest.mark.parametrize(
    ("lhs", "rhs", "packed", "rows", "kernel"),
    [
        # Packed weights are decoded, unless many rows make up for another layout.
        (None, MXFP4, True, 3, "mma"),
        (MXFP4, MXFP4, True, 3, "mma"),
        (MXFP8_E5M2, MXFP8_E4M3, True, 300, "tcgen05"),
        (None, MXFP4, True, 300, "xla"),
        (MXFP8_E4M3, MXFP4, True, 300, "xla"),
        (MXFP4, MXFP4, False, 3, "tcgen05"),
        (None, MXFP4, False, 3, "mma"),
        (NVFP4, None, False, 3, "mma"),
        (formats.MXINT8, formats.MXINT8, False, 3, "mma"),
        (MXFP8_E4M3, MXFP4, False, 300, "xla"),
    ],
    ids=str,
)
def test_which_kernel_blackwell_starts(
    lhs: BlockFormat | None,
    rhs: BlockFormat | None,
    packed: bool,
    rows: int,
    kernel: str,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
):
    def stop(name: Any, *args: Any, **kwargs: Any) -> None:
        raise Asked(name)

    monkeypatch.setattr(products.lax, "dot_general", functools.partial(stop, "xla"))
    monkeypatch.setattr(Kernel, "load", lambda kernel: stop(kernel.name))
    case = MatmulCase(lhs=lhs, rhs=rhs, dtype="bfloat16", m=(rows,), n=(3,), k=(64,))
    backend = backend_for(architecture=SM100)
    left, right = case.operands(rng)
    if packed:
        assert isinstance(right, MXArray)
        right = pack(SM100, right, case.call, lhs)
    with pytest.raises(Asked, match=kernel):
        jax.eval_shape(lambda x, w: backend.run(case.call, x, w), left, right)


# As a user's code has them ------------------------------------------------------------------------


@pytest.fixture
def blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops choose Blackwell's kernels, in the interpreter, for packing and for forward products."""

    def select(call: Call) -> Choice:
        mine = isinstance(call, PackCall) or (
            isinstance(call, MatmulCall) and meet(call.lhs.format, call.rhs.format)
        )
        backend = backend_for(SM100, interpreter()) if mine else REFERENCE
        return Choice(backend=backend, offer=backend.offers[type(call)], rejections=())

    monkeypatch.setattr(ops_packing, "choose", select)
    monkeypatch.setattr(dense, "choose", select)


def drawn(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(5).standard_normal(shape), jnp.float32)


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize("loop", mostly_slow(["scan", "vmap", "grad"], "scan"))
@pytest.mark.filterwarnings("ignore:matmul. weights are laid out for backend pallas_gpu")
def test_layers_stacked_and_differentiated(loop: str, monkeypatch: pytest.MonkeyPatch):
    recipe = recipes.mxfp4()
    kernels = mx_jax.quantize(drawn(2, 64, 64), "mxfp4", axis=-2)
    x = drawn(3, 64)
    layers: Any = jax.vmap(functools.partial(mx_jax.pack_weights, recipe=recipe))(kernels)
    if loop == "scan":
        # As one array, of which scan slices every leaf.
        at_once = mx_jax.pack_weights(kernels, num_batch=1, recipe=recipe)
        assert jax.tree.all(jax.tree.map(jnp.array_equal, at_once, layers))
        layers = at_once
    assert isinstance(layers, PackedMXArray)

    def run(x: jax.Array, layers: Any) -> jax.Array:
        def layer(x: jax.Array, w: Any) -> jax.Array:
            return mx_jax.matmul(x, w, recipe=recipe)

        if loop == "vmap":
            return jax.vmap(layer, in_axes=(None, 0))(x, layers)
        if loop == "scan":
            return jax.lax.scan(lambda x, w: (layer(x, w), None), x, layers)[0]
        first = jax.tree.map(lambda leaf: leaf[0], layers)
        return jax.grad(lambda x: (layer(x, first) ** 2).sum())(x)

    def unpack(self: PackedMXArray):
        raise AssertionError("a forward product reads weights as they are")

    expected = jax.jit(run)(x, kernels)
    if loop != "grad":
        monkeypatch.setattr(PackedMXArray, "unpack", unpack)
    actual = jax.jit(run)(x, layers)
    # Not bit for bit: a code of the next layer may round the other way.
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-4)
