"""The handler that casts along two axes in one read: wrong calls, reasons, and its use in training.

That it gives the reference's bits, the shared suite checks; and the C++ tests, on every instruction
set.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mx_jax
from mx_jax.backends.cpu_ffi import CPU_FFI, casts, library
from mx_jax.backends.target import Target
from mx_jax.formats import FLOAT8_ROWWISE_E4M3, MXFP4, MXFP8_E4M3, NVFP4
from mx_jax.ops import dense
from mx_jax.testing.cases import QuantizeBothCase, QuantizeCase
from mx_jax.testing.compare import assert_bitwise_equal

LOADED = library.load()
pytestmark = [
    pytest.mark.skipif(isinstance(LOADED, str), reason=f"no handlers: {LOADED}"),
    pytest.mark.usefixtures("insist"),
]
CPU = Target(platform="cpu")
F32, U8 = jnp.float32, jnp.uint8
X = jnp.ones((40, 64), F32)


def pair(*cases: QuantizeCase):
    return QuantizeBothCase(first=cases[0], second=cases[1]).call


def along(axis: int, format=MXFP8_E4M3, shape=(40, 64), **options) -> QuantizeCase:
    return QuantizeCase(format=format, shape=shape, axis=axis, **options)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (pair(along(0), along(0)), "along the last axis and another one, got axes (-2, -2)"),
        (
            pair(along(-1, FLOAT8_ROWWISE_E4M3), along(0, FLOAT8_ROWWISE_E4M3)),
            "along one axis each, got blocks=((-1, WHOLE),)",
        ),
        (pair(along(-1, block_size=4096), along(0)), "blocks <= 1024, got blocks=((-1, 4096),)"),
        (
            pair(along(-1, shape=(4, 5, 40)), along(0, shape=(4, 5, 40))),
            "along distant axes in whole blocks, got shape=(4, 5, 40), blocks=((-1, 32),)",
        ),
        (
            pair(along(-1, NVFP4), along(0, MXFP4)),
            "with tensor scales, or without, got one of each",
        ),
        (pair(along(-1, MXFP4, scale_rule="gaussian"), along(0)), "no scales by the rule"),
    ],
)
def test_reasons(call, reason: str):
    assert reason in str(CPU_FFI.rejects(call, CPU))


RESULTS = {"codes": (40, 64), "scales": (40, 2), "other_codes": (40, 64), "other_scales": (2, 64)}
WRONG_CALLS = {
    "codes": (dict(codes=(40, 63)), r"codes must be uint8 of shape \(40, 64\)"),
    "scales": (dict(scales=(40, 3)), r"scales must be uint8 of shape \(40, 2\)"),
    "other codes": (dict(other_codes=(4, 64)), r"codes must be uint8 of shape \(40, 64\)"),
    "other scales": (dict(other_scales=(40, 2)), r"scales must be uint8 of shape \(2, 64\)"),
    "axis": (dict(last_blocks=np.array([-2, 32])), "the last and an earlier one"),
    "same axis": (dict(other_blocks=np.array([-1, 32])), "the last and an earlier one"),
    "two axes": (dict(other_blocks=np.array([-2, 0, -1, 0])), "the last and an earlier one"),
    "rounding": (dict(other_rounding="up"), "unknown rounding='up'"),
    "missing bits": (
        dict(last_rounding="stochastic", last_random_bits=np.int32(16)),
        "needs 1 operands after x",
    ),
    "type": (dict(last_threshold="x"), "attribute last_threshold: "),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_calls(name: str):
    changed, message = WRONG_CALLS[name]
    call = pair(along(-1), along(0))
    attributes = casts._both_attributes((call.first, call.second), False) | changed
    shapes = [attributes.pop(result, shape) for result, shape in RESULTS.items()]
    results = [jax.ShapeDtypeStruct(shape, U8) for shape in shapes]
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"mx_jax quantize: .*{message}"):
        jax.block_until_ready(jax.ffi.ffi_call(casts.QUANTIZE_BOTH, results)(X, **attributes))


def test_distant_axes_need_whole_blocks():
    call = pair(along(-1, shape=(40, 3, 64)), along(0, shape=(40, 3, 64)))
    attributes = casts._both_attributes((call.first, call.second), False)
    x = jnp.ones((40, 3, 40))
    shapes = [(40, 3, 40), (40, 3, 2), (40, 3, 40), (2, 3, 40)]
    results = [jax.ShapeDtypeStruct(shape, U8) for shape in shapes]
    with pytest.raises(jax.errors.JaxRuntimeError, match="need whole blocks along the last"):
        jax.block_until_ready(jax.ffi.ffi_call(casts.QUANTIZE_BOTH, results)(x, **attributes))


def test_vmap_is_one_call_and_other_platforms_get_plain_jax():
    x = jax.random.normal(jax.random.key(0), (3, 40, 64))
    many = jax.jit(jax.vmap(lambda x: mx_jax.quantize_both(x, "nvfp4"))).trace(x)
    text = many.lower(lowering_platforms=("cpu",)).as_text()
    assert text.count("@mx_jax_cpu_quantize_both") == 1 and "while" not in text
    assert "mx_jax_cpu_quantize" not in many.lower(lowering_platforms=("cuda",)).as_text()


def test_shards_are_not_gathered():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    x = jax.random.normal(jax.random.key(0), (128, 256))
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("a", "b")))
    run = jax.jit(lambda x: mx_jax.quantize_both(x, "mxfp8_e4m3"))
    text = run.lower(sharded).compile().as_text()
    assert "mx_jax_cpu_quantize_both" in text and "all-gather" not in text
    for actual, expected in zip(run(sharded), run(x), strict=True):
        assert_bitwise_equal(actual.codes, expected.codes)
        assert_bitwise_equal(actual.scales, expected.scales)


# Training -----------------------------------------------------------------------------------------


def gradient(recipe, key=None):
    """The gradients of a product, compiled anew, and the program."""

    def loss(x, w):
        return (mx_jax.matmul(x, w, recipe=recipe, key=key) ** 2).sum()

    x = jax.random.normal(jax.random.key(0), (2, 64, 96))
    w = jax.random.normal(jax.random.key(1), (96, 128))
    lowered = jax.jit(jax.grad(loss, (0, 1))).lower(x, w)
    return lowered.compile()(x, w), lowered.as_text()


@pytest.mark.by_default("True")
@pytest.mark.parametrize("stochastic", [False, True])
def test_training_reads_cotangents_once(stochastic: bool, monkeypatch: pytest.MonkeyPatch):
    key = jax.random.key(3) if stochastic else None
    recipe = mx_jax.recipes.mxfp8()
    if stochastic:
        recipe = recipe.with_(gradients={"format": "mxfp8_e5m2", "rounding": "stochastic"})
    together, text = gradient(recipe, key)
    assert text.count("@mx_jax_cpu_quantize_both") == 1
    monkeypatch.setattr(dense.DenseProduct, "_quantized_cotangents", lambda self, g, key: (g, g))
    apart, text = gradient(recipe, key)
    assert "@mx_jax_cpu_quantize_both" not in text
    for left, right in zip(together, apart, strict=True):
        assert_bitwise_equal(left, right)


@pytest.mark.slow
def test_transformed_cotangents_are_cast_one_by_one():
    _, text = gradient(mx_jax.recipes.mxfp4_backward(), jax.random.key(0))
    assert "@mx_jax_cpu_quantize" in text and "@mx_jax_cpu_quantize_both" not in text
