"""Specs of codes and scales, and MXArrays put on several devices."""

import re
from typing import Any, cast

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import mx_jax
from mx_jax import formats
from mx_jax.sharding import device_put, spec_for

P = PartitionSpec


@pytest.mark.slow(but="mxfp4|rowwise")
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


@pytest.mark.parametrize(
    ("shape", "remedy"),
    [
        ((64, 96), "or along mesh axes whose devices divide 2 blocks evenly"),
        ((48, 96), "or pad to a multiple of 128"),
        ((32, 96), "or pad to a multiple of 128"),
    ],
)
def test_remedies_remedy(shape: tuple[int, int], remedy: str, mesh):
    x = mx_jax.quantize(np.ones(shape, np.float32), "mxfp4", axis=0)
    with pytest.raises(ValueError, match=remedy):
        device_put(x, NamedSharding(mesh, P("fsdp")))


@pytest.mark.parametrize("format", ["nvfp4", formats.FLOAT8_TENSORWISE_E4M3])
def test_tensors_quantized_one_by_one(format: Any, mesh):
    """Experts' tensor scales lie with their experts."""
    experts = np.ones((4, 32, 64), np.float32)
    x = jax.vmap(lambda w: mx_jax.quantize(w, format, axis=0))(experts)
    spec = P("fsdp", None, "model")
    put: Any = device_put(x, NamedSharding(mesh, spec))
    specs = spec_for(spec, format, axis=1, num_batch=1)
    for part, spec in zip(("codes", "scales", "tensor_scale"), specs, strict=True):
        array = getattr(put, part)
        if spec is not None:
            assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), 3), part
            assert array.sharding.shard_shape(array.shape)[0] == 1


def test_what_is_no_argument(mesh):
    with pytest.raises(TypeError, match="needs an MXArray and a NamedSharding, got ndarray"):
        device_put(cast(Any, np.ones(3)), NamedSharding(mesh, P()))
    with pytest.raises(ValueError, match="array_spec needs an entry for each axis"):
        spec_for(P("fsdp"), "mxfp4", axis=1)
