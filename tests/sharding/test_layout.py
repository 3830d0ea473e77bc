"""Specs of codes and scales, and MXArrays put on several devices."""

import re
from typing import Any, cast

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mx_jax
from mx_jax import formats
from mx_jax.sharding import device_put, spec_for

P = PartitionSpec


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("fsdp", "model"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.by_default("mxfp4|rowwise")
@pytest.mark.parametrize(
    ("format", "axis", "scales"),
    [
        ("mxfp4", 0, P("fsdp", "model")),
        (formats.FLOAT8_ROWWISE_E4M3, 0, P(None, "model")),
        (formats.FLOAT8_TENSORWISE_E4M3, 0, P(None, None)),
        ("nvfp4", -1, P("fsdp", "model")),
    ],
    ids=str,
)
def test_specs_are_those_that_arrays_are_put_with(format, axis, scales, mesh):
    spec = P("fsdp", "model")
    specs = spec_for(spec, format, axis=axis)
    assert (specs.codes, specs.scales) == (spec, scales)
    values = np.random.default_rng(0).normal(size=(128, 64)).astype(np.float32)
    x = mx_jax.quantize(values, format, axis=axis)
    put: Any = device_put(x, NamedSharding(mesh, spec))
    assert put.codes.sharding.spec == spec
    assert put.scales.sharding.is_equivalent_to(NamedSharding(mesh, scales), 2)
    if specs.tensor_scale is not None:
        assert put.tensor_scale.sharding.is_fully_replicated
    np.testing.assert_array_equal(put.dequantize(), x.dequantize())


def test_parts_of_blocks_are_refused(mesh):
    x = mx_jax.quantize(np.ones((64, 96), np.float32), "mxfp4", axis=0)
    message = (
        "device_put: every shard needs whole blocks along axis=0, got shard size=16 (64 over 4 "
        "devices, mesh axes=('fsdp',)) with block=32 of mxfp4, shape=(64, 96); shard another axis"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        device_put(x, NamedSharding(mesh, P("fsdp")))
    put: Any = device_put(x, NamedSharding(mesh, P("model", "fsdp")))
    assert put.scales.sharding.spec == P("model", "fsdp")


def test_what_is_no_argument(mesh):
    with pytest.raises(TypeError, match="needs an MXArray and a NamedSharding, got ndarray"):
        device_put(cast(Any, np.ones(3)), NamedSharding(mesh, P()))
    with pytest.raises(ValueError, match="array_spec needs an entry for each axis"):
        spec_for(P("fsdp"), "mxfp4", axis=1)
