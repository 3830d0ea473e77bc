"""Wrong calls of the CPU's handlers, and calls that they leave to others."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from mx_jax import formats
from mx_jax.backends.calls import Call
from mx_jax.backends.cpu_ffi import CPU_FFI, casts, library, products
from mx_jax.backends.target import Target
from mx_jax.formats import FLOAT8_ROWWISE_E4M3, MXFP4, MXFP4_2D, MXFP8_E4M3, NVFP4
from mx_jax.testing.cases import AttendCase, MatmulCase, QuantizeBothCase, QuantizeCase
from tests.extending.least_error import LEAST_ERROR
from tests.needs import needs_library

CPU = Target(platform="cpu")


def shapes_of(dtype: str) -> Callable[..., jax.ShapeDtypeStruct]:
    return lambda *shape: jax.ShapeDtypeStruct(shape, np.dtype(dtype))


def zeros_of(dtype: str) -> Callable[..., np.ndarray]:
    return lambda *shape: np.zeros(shape, dtype)


u8, i32, f32 = map(shapes_of, ("uint8", "int32", "float32"))
zeros, ints, keys, floats = map(zeros_of, ("uint8", "int32", "uint32", "float32"))


def along(axis: int, format: Any = MXFP8_E4M3, shape: Any = (40, 64), **how: Any) -> QuantizeCase:
    return QuantizeCase(format=format, shape=shape, axis=axis, **how)


def pair(first: QuantizeCase, second: QuantizeCase) -> Any:
    return QuantizeBothCase(first=first, second=second).call


CALL = along(-1, shape=(4, 64)).call
BOTH = pair(along(-1), along(0))
PLAIN = {"has_tensor_scale": False}
# A right call of each handler: its operands, its results and its attributes.
RIGHT: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    casts.QUANTIZE: (
        {"x": floats(4, 64)},
        {"codes": u8(4, 64), "scales": u8(4, 2)},
        casts.quantize_attributes(CALL, None, None),
    ),
    casts.DEQUANTIZE: (
        {"codes": zeros(4, 64), "scales": zeros(4, 2)},
        {"values": f32(4, 64)},
        casts.format_attributes(CALL.format) | {"blocks": casts.flat_blocks(CALL.blocks)} | PLAIN,
    ),
    casts.QUANTIZE_BOTH: (
        {"x": floats(40, 64)},
        {
            "codes": u8(40, 64),
            "scales": u8(40, 2),
            "other_codes": u8(40, 64),
            "other_scales": u8(2, 64),
        },
        {
            f"{prefix}_{name}": value
            for prefix, one in (("last", BOTH.first), ("other", BOTH.second))
            for name, value in casts.quantize_attributes(one, None, None).items()
        },
    ),
    casts.LEAST_LOSS: (
        {
            "x": floats(4, 64),
            "values": floats(4, 64),
            "other_values": floats(4, 64),
            "codes": zeros(4, 64),
            "other_codes": zeros(4, 64),
            "scales": zeros(4, 2),
            "other_scales": zeros(4, 2),
        },
        {"out_codes": u8(4, 64), "out_scales": u8(4, 2)},
        {"blocks": casts.flat_blocks(CALL.blocks)},
    ),
    casts.RANDOM_BITS: (
        {"keys": keys(2, 2)},
        {"bits": i32(2, 3)},
        {"width": np.int32(16), "derivations": np.zeros(0, np.int64)},
    ),
    casts.TRANSFORM: (
        {"x": floats(4, 64), "signs": ints(32)},
        {"out": f32(4, 64)},
        {"num_inner": np.int32(0), "size": np.int32(32), "derivations": np.zeros(0, np.int64)},
    ),
    products.MATMUL: (
        {
            "lhs": zeros(5, 64),
            "lhs_scales": zeros(5, 2),
            "lhs_tensor_scale": floats(0),
            "rhs": zeros(7, 64),
            "rhs_scales": zeros(7, 2),
            "rhs_tensor_scale": floats(0),
        },
        {"product": f32(5, 7)},
        {
            "lhs_element": "e2m1",
            "rhs_element": "e4m3",
            "lhs_scale": "e8m0",
            "rhs_scale": "e8m0",
            "block": np.int32(32),
            "lhs_k_first": False,
            "rhs_k_first": False,
            "lhs_block_rows": np.int32(1),
            "rhs_block_rows": np.int32(1),
        },
    ),
}


def call(target: str, **changes: Any) -> Any:
    operands, results, attributes = RIGHT[target]
    if "tensor_scale" in changes:
        results = results | {"tensor_scale": None}
    attributes = operands | results | attributes | changes
    outputs = [attributes.pop(name) for name in results]
    inputs = [attributes.pop(name) for name in operands]
    run = jax.ffi.ffi_call(target, outputs if outputs[1:] else outputs[0])
    return jax.block_until_ready(run(*inputs, **attributes))


def blocks(*pairs: int) -> dict[str, Any]:
    return {"blocks": np.array(pairs, np.int64)}


DRAWS = {"rounding": "stochastic", "random_bits": np.int32(16)}
LARGEST = {"largest_value": np.float32(2688)}
DTYPES = "needs float32, bfloat16 or float16"
KEYS = "needs keys uint32"
WRONG: dict[str, list[tuple[dict[str, Any], str]]] = {
    casts.RANDOM_BITS: [
        ({"keys": keys(3, 2)}, KEYS),
        ({"keys": ints(2, 2)}, KEYS),
        ({"keys": keys(2, 3, 1, 2)}, r"got keys.shape=\(2, 3, 1, 2\), shape="),
        ({"width": np.int32(33)}, "needs a width of 1 to 32, got width=33"),
    ],
    casts.TRANSFORM: [
        ({"signs": ints(16)}, r"got x.shape=\(4, 64\), signs.shape=\(16\)"),
        ({"signs": floats(32)}, "needs x"),
        ({"signs": keys(32)}, KEYS),
        ({"size": np.int32(24), "signs": ints(24)}, "size must be a power of two"),
    ],
    casts.LEAST_LOSS: [
        ({"x": ints(4, 64)}, DTYPES),
        ({"codes": zeros(4, 63)}, r"codes must be of shape \(4, 64\), .*codes.shape=\(4, 63\)"),
        ({"out_scales": u8(4, 3)}, r"scales of shape \(4, 2\)"),
        ({"other_values": floats(64)}, r"values and codes must be of shape"),
        ({"blocks": np.array([-3, 32])}, "blocks need axes in -2..-1"),
    ],
    casts.QUANTIZE: [
        ({"x": ints(4, 64)}, DTYPES),
        ({"codes": u8(4, 63)}, r"codes must be uint8 of shape \(4, 64\)"),
        ({"scales": u8(4, 3)}, r"scales must be uint8 of shape \(4, 2\)"),
        (blocks(-3, 32), "blocks need axes in -2..-1"),
        (blocks(-1), "blocks must be pairs of axis and size"),
        (blocks(-1, 0, -2, 0), "neighbours, ascending"),
        (blocks(-2, 32, -1, 32), r"scales must be uint8 of shape \(1, 2\)"),
        (
            {"x": floats(4, 8, 2)} | blocks(-3, 2, -2, 4),
            "several blocked axes must be whole, or the last two, got 2 axes from axis=-3 on",
        ),
        ({"element": np.arange(8, dtype=np.int32)}, "element must be the 8 facts"),
        ({"rounding": "up"}, "unknown rounding='up'"),
        ({"random_bits": np.int32(3)}, "0 for others, got random_bits=3"),
        ({"rule": "best"}, "unknown rule='best'"),
        ({"threshold": np.int32(0)}, "needs 1 <= threshold"),
        ({"has_tensor_scale": True}, "needs 1 operands after x"),
        (DRAWS, "needs 1 operands"),
        (
            LARGEST | {"tensor_scale": f32(4, 2)},
            r"last axes, .*reduced to 1, got tensor_sc",
        ),
        (LARGEST | {"tensor_scale": f32(1)}, "reduced to 1"),
        (
            LARGEST | {"tensor_scale": f32(4, 1), "scales": u8(1, 64)} | blocks(-2, 16),
            "all blocked ones among them, reduced to 1",
        ),
        (LARGEST, "needs 1 results after scales: a tensor scale where .*, got 0"),
        ({"tensor_scale": f32(1, 1)}, "needs 0 results after scales"),
        (LARGEST | {"largest_value": np.float32(-1)}, "largest_value must be above 0"),
    ],
    casts.DEQUANTIZE: [
        ({"codes": zeros(4, 63)}, r"codes must be uint8 of shape \(4, 64\)"),
        ({"scales": zeros(4, 1)}, r"scales must be uint8 of shape \(4, 2\)"),
        ({"values": i32(4, 64)}, DTYPES),
        ({"kind": "percent"}, "unknown kind='percent'"),
        ({"element": np.zeros(3, np.int32)}, "element must be the 8 facts"),
        ({"has_tensor_scale": True}, "needs 1 operands after scales"),
    ],
    casts.QUANTIZE_BOTH: [
        ({"codes": u8(40, 63)}, r"codes must be uint8 of shape \(40, 64\)"),
        ({"other_codes": u8(4, 64)}, r"codes must be uint8 of shape \(40, 64\)"),
        ({"other_scales": u8(40, 2)}, r"scales must be uint8 of shape \(2, 64\)"),
        ({"last_blocks": np.array([-2, 32])}, "the last and an earlier one"),
        ({"other_blocks": np.array([-1, 32])}, "the last and an earlier one"),
        ({"other_rounding": "up"}, "unknown rounding='up'"),
        ({f"last_{name}": value for name, value in DRAWS.items()}, "needs 1 operands after x"),
        ({"last_threshold": "x"}, "attribute last_threshold: "),
        (
            {
                "x": floats(40, 3, 40),
                "codes": u8(40, 3, 40),
                "scales": u8(40, 3, 2),
                "other_codes": u8(40, 3, 40),
                "other_scales": u8(2, 3, 40),
                "other_blocks": np.array([-3, 32]),
            },
            "need whole blocks along the last",
        ),
    ],
    products.MATMUL: [
        ({"block": np.int32(8)}, "block must be 16 or 32, got block=8"),
        ({"lhs_element": "e9m9"}, "unknown lhs_element='e9m9'"),
        ({"rhs_scale": "f32"}, "unknown rhs_scale='f32'"),
        ({"lhs_element": "none"}, f"lhs_element='none' {DTYPES}"),
        ({"lhs_scales": zeros(5, 3)}, r"lhs_scales must have shape \(5, 2\)"),
        ({"lhs_block_rows": np.int32(4)}, r"lhs_scales must have .* \(2, 2\) .*block_rows=4, got"),
        ({"rhs_block_rows": np.int32(0)}, "rhs_block_rows must be above 0, got rhs_block_rows=0"),
        ({"rhs": np.zeros((7, 64), np.int8)}, "codes and scales must be uint8"),
        ({"rhs": zeros(64)}, r"rhs must be \[\*batch, rows, k\]"),
        (
            {"rhs": zeros(7, 96), "rhs_scales": zeros(7, 3)},
            r"both operands must have one k, got lhs.shape=\(5, 64\), rhs.shape=\(7, 96\)",
        ),
        ({"product": f32(5, 8)}, r"product's shape \(5, 8\) does not follow from lhs.shape=\(5, 6"),
        ({"product": i32(5, 7)}, f"the product {DTYPES}"),
        (
            {"lhs_tensor_scale": floats(3)},
            r"lhs_tensor_scale must be of shape \(0,\), .*got lhs_tensor_scale.shape=\(3\) for",
        ),
        (
            {"rhs_tensor_scale": floats(1, 0)},
            r"rhs_tensor_scale must be .*got rhs_tensor_scale.shape=\(1, 0\)",
        ),
    ],
}


@needs_library
@pytest.mark.parametrize("target", RIGHT)
def test_wrong_calls(target: str):
    call(target)
    for changes, message in WRONG[target]:
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"mx_jax .*: .*{message}"):
            call(target, **changes)


DISTANT = (4, 5, 40)


@needs_library
@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (along(-1, MXFP4, scale_rule=LEAST_ERROR).call, "no scales by the rule 'least_error'"),
        (
            along(1, MXFP4_2D, (64, 64, 2)).call,
            "takes two-dimensional blocks of the last two axes, got blocks=((-3, 32), (-2, 32))",
        ),
        (pair(along(0), along(0)), "along the last axis and another one, got axes (-2, -2)"),
        (
            pair(along(-1, FLOAT8_ROWWISE_E4M3), along(0, FLOAT8_ROWWISE_E4M3)),
            "along one axis each, got blocks=((-1, WHOLE),)",
        ),
        (pair(along(-1, block_size=4096), along(0)), "blocks <= 1024, got blocks=((-1, 4096),)"),
        (
            pair(along(-1, shape=DISTANT), along(0, shape=DISTANT)),
            "along distant axes in whole blocks, got shape=(4, 5, 40), blocks=((-1, 32),)",
        ),
        (pair(along(-1, NVFP4), along(0, MXFP4)), "tensor scales, or without, got one of each"),
        (pair(along(-1, MXFP4, scale_rule=LEAST_ERROR), along(0)), "no scales by the rule"),
        (
            MatmulCase(lhs=MXFP4.with_block(64), rhs=MXFP4.with_block(64)).call,
            "needs blocks of 16 or 32 along k",
        ),
        (MatmulCase(lhs=MXFP4, rhs=NVFP4).call, "needs one block size, got lhs="),
        (
            MatmulCase(lhs=MXFP4, rhs=MXFP4_2D, n=(2, 40)).call,
            "needs the last of several kept axes in whole blocks of 32, got rhs_shape=",
        ),
        (AttendCase(tokens=3).call, "attends with one token, XLA's dot with several, got tokens=3"),
        (AttendCase(dtype="bfloat16").call, "attends in float32, got dtypes="),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_reasons(call: Call, reason: str):
    assert reason in str(CPU_FFI.rejects(call, CPU))


def test_other_machines():
    assert CPU_FFI.rejects(CALL, Target(platform="cpu", num_devices=8)) == (
        "runs on one device: JAX cannot hand a custom call every sharding, got num_devices=8; "
        "only_backend('cpu_ffi') insists"
    )
    gpu = Target(platform="cuda")
    assert CPU_FFI.rejects(CALL, gpu) == "runs on platform=cpu, got platform=cuda"


@needs_library
@pytest.mark.parametrize("isa", sorted({*library._X86_ISAS, *library._ARM_ISAS}))
def test_float32_panels_leave_large_products_to_xla(isa: str, monkeypatch: pytest.MonkeyPatch):
    loaded = library.load()
    assert not isinstance(loaded, str)
    monkeypatch.setattr(library, "load", lambda: dataclasses.replace(loaded, isa=isa))

    def kernel(lhs, rhs, rows: int, dtype: str = "float32") -> bool:
        call = MatmulCase(lhs=lhs, rhs=rhs, m=(rows,), n=(4096,), dtype=dtype).call
        assert products.rejects(call) is None
        how = products.describe(call)
        assert not how or how.startswith(f"by XLA's dot: {isa} would multiply in float32")
        return not how

    bf16, integers = isa == "avx512_bf16", isa not in ("portable", "avx512")
    assert kernel(formats.MXFP4, formats.MXINT8, 4096) == integers
    assert kernel(formats.MXFP6_E3M2, formats.MXFP4, 4096) == (integers and isa.startswith("avx"))
    assert kernel(formats.MXFP8_E4M3, formats.MXFP4, 4096) == bf16
    assert not kernel(None, formats.MXFP4, 4096)
    assert kernel(None, formats.MXFP8_E4M3, 4096, "bfloat16") == bf16
    assert kernel(None, formats.MXFP4, 8)
