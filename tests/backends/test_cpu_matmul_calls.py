"""Wrong calls of the CPU's product handler, and calls that it leaves to others."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mx_jax import formats
from mx_jax.backends.cpu_ffi import library, rejections
from mx_jax.testing.cases import MatmulCase
from tests.needs import needs_library

pytestmark = needs_library


def call_handler(**changes: Any) -> jax.Array:
    case = MatmulCase(lhs=formats.MXFP4, rhs=formats.MXFP8_E4M3, m=(5,), n=(7,), k=(64,))
    lhs: Any
    rhs: Any
    lhs, rhs = case.operands(np.random.default_rng(8))
    arguments: dict[str, Any] = {
        "lhs": lhs.codes,
        "lhs_scales": lhs.scales,
        "lhs_tensor_scale": jnp.zeros((0,), jnp.float32),
        "rhs": rhs.codes,
        "rhs_scales": rhs.scales,
        "rhs_tensor_scale": jnp.zeros((0,), jnp.float32),
        "lhs_element": "e2m1",
        "rhs_element": "e4m3",
        "lhs_scale": "e8m0",
        "rhs_scale": "e8m0",
        "block": np.int32(32),
        "lhs_k_first": False,
        "rhs_k_first": False,
        "lhs_block_rows": np.int32(1),
        "rhs_block_rows": np.int32(1),
    }
    shape = changes.pop("shape", (5, 7))
    dtype = changes.pop("dtype", jnp.float32)
    arguments |= changes
    parts = ("", "_scales", "_tensor_scale")
    operands = [arguments.pop(side + part) for side in ("lhs", "rhs") for part in parts]
    result = jax.ShapeDtypeStruct(shape, dtype)
    return jax.ffi.ffi_call(rejections.MATMUL, result)(*operands, **arguments)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"block": np.int32(8)}, "block must be 16 or 32, got block=8"),
        ({"lhs_element": "e9m9"}, "unknown lhs_element='e9m9'"),
        ({"rhs_scale": "f32"}, "unknown rhs_scale='f32'"),
        ({"lhs_element": "none"}, "lhs_element='none' needs float32, bfloat16 or float16"),
        ({"lhs_scales": jnp.zeros((5, 3), jnp.uint8)}, r"lhs_scales must have shape \(5, 2\)"),
        ({"lhs_block_rows": np.int32(4)}, r"lhs_scales must have .* \(2, 2\) .*block_rows=4, got"),
        ({"rhs_block_rows": np.int32(0)}, "rhs_block_rows must be above 0, got rhs_block_rows=0"),
        ({"rhs": jnp.zeros((7, 64), jnp.int8)}, "codes and scales must be uint8"),
        ({"rhs": jnp.zeros((64,), jnp.uint8)}, r"rhs must be \[\*batch, rows, k\]"),
        (
            {"rhs": jnp.zeros((7, 96), jnp.uint8), "rhs_scales": jnp.zeros((7, 3), jnp.uint8)},
            r"both operands must have one k, got lhs.shape=\(5, 64\), rhs.shape=\(7, 96\)",
        ),
        ({"shape": (5, 8)}, r"product's shape \(5, 8\) does not follow from lhs.shape=\(5, 64\)"),
        ({"shape": (1, 5, 7)}, r"product's shape \(1, 5, 7\) does not follow"),
        ({"dtype": jnp.int32}, "the product must be float32, bfloat16 or float16"),
        (
            {"lhs_tensor_scale": jnp.ones((3,), jnp.float32)},
            r"lhs_tensor_scale must be of shape \(0,\), .*got lhs_tensor_scale.shape=\(3\) for",
        ),
        (
            {"rhs_tensor_scale": jnp.ones((1, 0), jnp.float32)},
            r"rhs_tensor_scale must be .*got rhs_tensor_scale.shape=\(1, 0\)",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_wrong_calls_are_refused(changes: dict[str, Any], complaint: str):
    with pytest.raises(jax.errors.JaxRuntimeError, match=complaint):
        jax.block_until_ready(call_handler(**changes))


def test_a_right_call_is_not():
    assert call_handler().shape == (5, 7)


def test_rows_share_the_scales_of_square_blocks():
    rng = np.random.default_rng(1)
    lhs, rhs = (jnp.asarray(rng.integers(120, 134, (2, 2)), jnp.uint8) for _ in range(2))
    codes = jnp.asarray(rng.integers(0, 120, (64, 7)), jnp.uint8)
    k_first = {"rhs": codes, "rhs_k_first": True}
    found = call_handler(
        lhs_scales=lhs,
        lhs_block_rows=np.int32(4),
        rhs_scales=rhs,
        rhs_block_rows=np.int32(4),
        **k_first,
    )
    expected = call_handler(
        lhs_scales=jnp.repeat(lhs, 4, 0)[:5], rhs_scales=jnp.repeat(rhs, 4, 1)[:, :7], **k_first
    )
    np.testing.assert_array_equal(found, expected)
    assert np.unique(np.asarray(found)).size > 30


@pytest.mark.parametrize(
    ("case", "complaint"),
    [
        (
            MatmulCase(lhs=formats.FLOAT8_ROWWISE_E4M3, rhs=formats.FLOAT8_ROWWISE_E4M3),
            "needs scales in e8m0 or e4m3",
        ),
        (
            MatmulCase(lhs=formats.MXFP4.with_block(64), rhs=formats.MXFP4.with_block(64)),
            "needs blocks of 16 or 32 along k",
        ),
        (
            MatmulCase(lhs=formats.MXFP4, rhs=formats.MXFP4_2D, n=(2, 40)),
            "needs whole blocks of the last of several kept axes, got rhs=",
        ),
    ],
    ids=str,
)
def test_what_it_leaves_to_others(case: MatmulCase, complaint: str):
    reason = rejections.rejects(case.call)
    assert reason is not None and complaint in reason


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16"])
def test_float32_panels_leave_large_products_to_xla(isa: str, monkeypatch: pytest.MonkeyPatch):
    loaded = library.load()
    assert not isinstance(loaded, str)
    monkeypatch.setattr(library, "load", lambda: dataclasses.replace(loaded, isa=isa))

    def taken(lhs, rhs, rows: int, dtype: str = "float32") -> bool:
        call = MatmulCase(lhs=lhs, rhs=rhs, m=(rows,), n=(4096,)).call
        if lhs is None:
            call = dataclasses.replace(
                call, lhs=dataclasses.replace(call.lhs, dtype=jnp.dtype(dtype))
            )
        reason = rejections.rejects(call)
        assert reason is None or f"multiplies these in float32 on {isa}" in reason
        return reason is None

    vnni, bf16 = isa in ("avx512_vnni", "avx512_bf16"), isa == "avx512_bf16"
    assert taken(formats.MXFP4, formats.MXINT8, 4096) == vnni
    assert taken(formats.MXFP6_E3M2, formats.MXFP4, 4096) == vnni
    assert taken(formats.MXFP8_E4M3, formats.MXFP4, 4096) == bf16
    assert not taken(None, formats.MXFP4, 4096)
    assert taken(None, formats.MXFP8_E4M3, 4096, "bfloat16") == bf16
    assert taken(None, formats.MXFP4, 8)
