"""MXArrays as plain arrays, through what saves trees of arrays, and back."""

import dataclasses
import functools
import io
import json
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training.train_state import TrainState

import mx_jax
from mx_jax import checkpoint, formats
from mx_jax.formats import BLOCK_FORMATS, MXFP4, MXFP6_E2M3, NVFP4, BlockFormat
from tests.checkpoint.stored import assert_same, draw
from tests.needs import needs_library

CUSTOM = BlockFormat(
    name="mine",
    element=formats.ElementFormat(name="e2m2", exponent_bits=2, mantissa_bits=2, bias=1),
    scale=dataclasses.replace(formats.E8M0, name="mine_too"),
    block=(1, 8),
)


@pytest.mark.parametrize(
    ("format", "shape", "axis"),
    [
        *((format, (3, 70), -1) for format in (*BLOCK_FORMATS, CUSTOM)),
        *((format, (2, 33, 5), -2) for format in (MXFP6_E2M3, NVFP4, formats.NVFP4_2D, CUSTOM)),
        (formats.block_format("mxfp8_e4m3_2d"), (2, 33, 70), -2),
    ],
    ids=str,
)
def test_there_and_back(format: BlockFormat, shape: Any, axis: int, rng: np.random.Generator):
    x = draw(format, shape, rng, axis=axis)
    wire = checkpoint.to_wire({"a": [x, 1]})
    arrays = wire["a"][0]
    assert {type(array) for array in arrays.values()} == {np.ndarray}
    np.testing.assert_array_equal(arrays["codes"], np.asarray(x.packed_codes))
    back = checkpoint.from_wire(wire)
    assert_same(back["a"][0], x)
    assert back["a"][1] == 1


@pytest.mark.parametrize("format", ["mxfp4", "mxfp6_e2m3", "mxfp8_e4m3", "nvfp4"])
def test_from_packed(format: str, rng: np.random.Generator):
    x = draw(formats.block_format(format), (3, 64), rng, axis=-2)
    y = checkpoint.from_packed(
        x.packed_codes,
        x.scales,
        format=format,
        length=64,
        axis=0,
        tensor_scale=x.tensor_scale,
        dtype="bfloat16",
    )
    assert_same(y, x)


def test_from_packed_refuses():
    codes, scales = jnp.zeros((2, 16), jnp.uint8), jnp.zeros((2, 1), jnp.uint8)
    with pytest.raises(ValueError, match=r"length=33 codes of bits=4 take 17 bytes"):
        checkpoint.from_packed(codes, scales, format="mxfp4", length=33)
    with pytest.raises(ValueError, match=r"scales must have one entry a block.*\(2, 2\)"):
        checkpoint.from_packed(codes, scales, format="nvfp4_one_level", length=32)
    with pytest.raises(ValueError, match=r"axis=2 is out of range for shape=\(2, 32\)"):
        checkpoint.from_packed(codes, scales, format="mxfp4", length=32, axis=2)
    with pytest.raises(ValueError, match="needs blocks along one axis, got format=mxfp4_2d"):
        checkpoint.from_packed(codes, scales, format="mxfp4_2d", length=32)


@needs_library
def test_packed_weights_go_as_what_they_hold(rng: np.random.Generator):
    """By the C++ library, which several simulated devices are not given unasked."""
    x = draw(MXFP4, (64, 32), rng, axis=-2)
    with mx_jax.only_backend("cpu_ffi"):
        packed = mx_jax.pack_weights(x)
    assert isinstance(packed, mx_jax.PackedMXArray)
    assert_same(checkpoint.from_wire(checkpoint.to_wire(packed)), x)


def test_without_axes(rng: np.random.Generator):
    x = dataclasses.replace(
        draw(MXFP4, (1,), rng), codes=jnp.uint8(3), scales=jnp.uint8(127), blocks=()
    )
    assert_same(checkpoint.from_wire(checkpoint.to_wire(x)), x)


def test_arrays_of_a_reader(rng: np.random.Generator):
    """np.savez and its like, and arrays that came back on a device."""
    x, file = draw(NVFP4, (4, 32), rng), io.BytesIO()
    np.savez(file, **checkpoint.to_wire(x))
    file.seek(0)
    assert_same(checkpoint.from_wire(dict(np.load(file))), x)
    assert_same(checkpoint.from_wire(jax.tree.map(jnp.asarray, checkpoint.to_wire(x))), x)


ELEMENT, SCALE = ("format", "element"), ("format", "scale")


def changed(*place: str, **facts: Any) -> Any:
    """A way to damage a description: by these facts, at a place in it."""

    def change(result: Any) -> Any:
        functools.reduce(dict.__getitem__, place, result).update(facts)
        return result

    return change


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            changed(*SCALE, element=dataclasses.asdict(formats.E4M3)),
            r"kind='exponent' with element=ElementFormat\(e4m3\)",
        ),
        (changed(*SCALE, element=3), "its description is no MXArray's"),
        (changed(*SCALE, colour="red"), "needs colour of type NoneType, got 'red'"),
        (changed(*SCALE, kind="scaled"), "needs kind of type str, got 'scaled'"),
        # A table of so many codes would never be done.
        (changed(*SCALE, bits=10**9), "a scale of kind='exponent' with bits=1000000000"),
        (changed(version=2), "is of version=2, this mx_jax reads 1"),
        (lambda result: {}, "'version' is missing"),
        (lambda result: 3, "its description is no MXArray's"),
        (changed(shape=[2, -64]), "needs integers from 0, got -64"),
        (changed(shape=[2, 65]), r"codes must be uint8 of shape=\(2, 33\)"),
        (changed(blocks=[[-1, 16]]), "blocks must be the format's"),
        (changed(blocks=[[-1, 0]]), "needs integers from 1, got 0"),
        (changed(dtype="int8"), "is no float dtype"),
        (changed(dtype="__name__"), "names no dtype"),
        (changed(*ELEMENT, exponent_bits="2"), "needs exponent_bits of type int, got '2'"),
        (changed(*ELEMENT, bias=10**400), "OverflowError|too large|choose another bias"),
        (changed(*ELEMENT, dtype_name="finfo"), "dtype_name='finfo' names no dtype"),
        (changed(colour="red"), None),
    ],
)
def test_damaged_descriptions(change: Any, complaint: str | None, rng: np.random.Generator):
    x = draw(MXFP4, (2, 64), rng)
    wire = checkpoint.to_wire({"layer": x})
    text = json.dumps(change(json.loads(wire["layer"]["mx_jax"].tobytes()))).encode()
    wire["layer"]["mx_jax"] = np.frombuffer(text, np.uint8)
    if complaint is None:
        # Later versions may say more.
        assert_same(checkpoint.from_wire(wire)["layer"], x)
        return
    with pytest.raises(ValueError, match=f"(?s)from_wire: layer: .*({complaint})"):
        checkpoint.from_wire(wire)


def test_no_json(rng: np.random.Generator):
    wire = checkpoint.to_wire(draw(MXFP4, (2, 64), rng))
    for text in (b"{", b"\xff", b"[" * 100_000):
        with pytest.raises(ValueError, match="from_wire: the tree: its description is no JSON"):
            checkpoint.from_wire(wire | {"mx_jax": np.frombuffer(text, np.uint8)})


def layer_state(kernel: Any) -> TrainState:
    layer = mx_jax.nn.linen.Dense(8, recipe=mx_jax.recipes.weight_only("mxfp4"))
    params = {"kernel": kernel, "bias": jnp.ones(kernel.shape[-1])}
    return TrainState.create(apply_fn=layer.apply, params=params, tx=optax.identity())


class TestFlax:
    @pytest.mark.parametrize("format", [MXFP4, MXFP6_E2M3, NVFP4], ids=str)
    def test_bytes(self, format: BlockFormat, rng: np.random.Generator):
        """A state with MXArrays goes through msgpack, whatever the format of the target."""
        # Three columns of six bits are three bytes, packed or not.
        x, other = draw(format, (64, 3), rng, axis=-2), draw(MXFP4, (64, 3), rng, axis=-2)
        text = serialization.to_bytes(layer_state(x))
        restored: Any = serialization.from_bytes(layer_state(other), text)
        assert_same(restored.params["kernel"], x)

    def test_an_attribute_of_a_module(self, rng: np.random.Generator):
        """Linen takes attributes apart and together again: nothing is computed or lost by it."""

        class Layer(nn.Module):
            def setup(self):
                self.kernel = mx_jax.quantize(
                    self.param("w", nn.initializers.ones, (64, 8)), "mxfp4"
                )

            def __call__(self, x):
                return x @ self.kernel.dequantize()

        params = {"params": {"w": jnp.asarray(rng.standard_normal((64, 8)), jnp.float32)}}
        x = jnp.ones((2, 64))
        gradient = jax.jit(jax.grad(lambda p: jnp.sum(Layer().apply(p, x))))(params)
        np.testing.assert_array_equal(gradient["params"]["w"], np.full((64, 8), 2))

    def test_another_shape(self, rng: np.random.Generator):
        x, other = draw(MXFP4, (64, 8), rng), draw(MXFP4, (8, 64), rng)
        with pytest.raises(ValueError, match=r"MXArray of shape=\(8, 64\), got MXArray.*\(64, 8\)"):
            serialization.from_state_dict(other, serialization.to_state_dict(x))
