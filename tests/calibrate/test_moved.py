"""Rotated and equalized models: the same function, with the weights that the docs say."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from benchmarks.llama import GGUF, HUB, Llama, params_of
from mx_jax import calibrate, recipes
from mx_jax.calibrate import Channels, Features, Pair
from mx_jax.calibrate.rotate import orthogonal
from tests.examples import tiny_llama as tiny
from tests.quick import quick

NAMES = {"gguf": GGUF, "hub": HUB}


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


def tensors(style: str = "gguf", tied: bool = True) -> dict[str, np.ndarray]:
    """The tiny model's in float64; gains of either sign, near zero and zero; outliers in some."""
    config = dataclasses.replace(tiny.CONFIG, tied=tied)
    held, rng = tiny.tensors(config), np.random.default_rng(1)
    for name, w in held.items():
        if w.ndim == 1:
            held[name] = np.concatenate(
                [[0.0, 1e-30, -1e-12, 8.0], rng.normal(size=len(w) - 4)]
            ).astype(np.float32)
    held = held if style == "gguf" else tiny.hub_tensors(held, config)
    return {name: w.astype(np.float64) for name, w in held.items()}


def params(style: str = "gguf", tied: bool = True) -> dict[str, Any]:
    config = dataclasses.replace(tiny.CONFIG, tied=tied)
    return params_of(tensors(style, tied), config, NAMES[style], dtype=np.float64)


def logits(params: dict[str, Any]) -> np.ndarray:
    """In float64, but for the angles of the rotary embedding."""
    config = dataclasses.replace(tiny.CONFIG, tied="head" not in params)
    model = Llama(config, recipes.high_precision(), jnp.float64)
    return np.asarray(quick(model.apply)({"params": params}, tiny.TOKENS)[0], np.float64)


def moments(params: dict[str, Any]) -> calibrate.Moments:
    config = dataclasses.replace(tiny.CONFIG, tied="head" not in params)
    model = Llama(config, recipes.high_precision(), jnp.float64)
    return calibrate.moments(model, [tiny.TOKENS], variables={"params": params})


def assert_same(one: np.ndarray, other: np.ndarray) -> None:
    assert np.abs(one - other).max() < 1e-4 * np.abs(other).max()


@pytest.mark.parametrize("tied", [True, False])
def test_functions_stay(tied: bool):
    """Of a rotated, an equalized model and one that is both; gains of any size."""
    plain = params(tied=tied)
    channels, exact = calibrate.llama(plain, tiny.CONFIG.head_width), logits(plain)
    rotated = calibrate.rotate(plain, channels)
    equalized, _ = calibrate.equalize(plain, channels, moments(plain), "mxfp4")
    both, _ = calibrate.equalize(rotated, channels, moments(rotated), "mxfp4")
    for moved in (rotated, equalized, both):
        assert_same(logits(moved), exact)
        # Nothing is where it was, and a table that was tied is two.
        changed = jax.tree.map(lambda a, b: (a != b).any(), plain["layers_0"], moved["layers_0"])
        assert all(jax.tree.leaves(changed))
        size = sum(w.size for w in jax.tree.leaves(moved))
        table = plain["embedding"].size if tied else 0
        assert size == sum(w.size for w in jax.tree.leaves(plain)) + table
    np.testing.assert_array_equal(equalized["embedding"], plain["embedding"])
    assert set(np.unique(rotated["norm"]["scale"])) == {1.0}
    # Or one table, behind a kernel; where the head is a parameter, none is needed.
    one_table = calibrate.rotate(plain, channels, tied="head_input")
    assert_same(logits(one_table), exact)
    assert set(one_table) == {*plain, *(["head_input"] if tied else [])}


@pytest.mark.parametrize("style", ["gguf", "hub"])
def test_checkpoints_by_their_names(style: str):
    """Of tensors `[out, in]`, queries, keys and values apart; the head gets the name it has."""
    held = tensors(style)
    channels = calibrate.llama(held, tiny.CONFIG.head_width)
    rotated = calibrate.rotate(held, channels)
    assert set(rotated) == {*held, NAMES[style].of("head")}
    equalized, inputs = calibrate.equalize(held, channels, _tensor_moments(style), "nvfp4")
    # The moment of a table that was the head goes with the head.
    assert NAMES[style].of("head") in inputs and NAMES[style].of("embedding") not in inputs
    exact, config = logits(params(style)), dataclasses.replace(tiny.CONFIG, tied=False)
    for moved in (rotated, equalized):
        assert_same(logits(params_of(moved, config, NAMES[style], dtype=np.float64)), exact)


def _tensor_moments(style: str) -> dict[str, jax.Array]:
    held, name = moments(params(style)), NAMES[style].of
    whole = {"query": "qkv", "key": "qkv", "value": "qkv", "out": "attention_out"}
    whole |= {"gate": "gate_up", "up": "gate_up", "down": "down"}
    result = {name("embedding"): held["embedding"]}
    for i in range(tiny.CONFIG.layers):
        result |= {name(field, i): held[f"layers_{i}/{path}"] for field, path in whole.items()}
    return result


def test_moments_are_those_of_the_new_inputs():
    """So that GPTQ may follow without another pass over the texts."""
    plain = params(tied=False)
    channels = calibrate.llama(plain, tiny.CONFIG.head_width)
    equalized, inputs = calibrate.equalize(plain, channels, moments(plain), "nvfp4")
    again = moments(equalized)
    assert set(inputs) == set(again)
    for path, moment in again.items():
        scale = np.abs(moment).max()
        np.testing.assert_allclose(inputs[path], moment, rtol=1e-3, atol=1e-4 * scale)


def test_scales_take_errors_away(rng):
    """Of a product with inputs of uneven sizes; heads that share values have equal scales."""
    heads, shared, width, rows = 4, 2, 16, 24
    values, out = rng.normal(size=(8, 32)), rng.normal(size=(64, rows))
    bias = rng.normal(size=32)
    sizes = np.exp(2 * rng.normal(size=(shared, 1, width)))
    x = rng.normal(size=(400, heads, width)) * np.broadcast_to(sizes, (2, 2, 16)).reshape(4, 16)
    moment = x.reshape(400, -1).T @ x.reshape(400, -1)
    written = Features("values", 1), Features("bias")
    channels = Channels(values=(Pair(written, (Features("out"),), width),))
    plain = {"values": values, "bias": bias, "out": out.astype(np.float32)}
    moved, _ = calibrate.equalize(plain, channels, {"out": moment}, "nvfp4")
    scales = np.asarray(moved["out"] / out)[:, 0].reshape(shared, heads // shared, width)
    np.testing.assert_allclose(scales[:, :1], scales[:, 1:], rtol=1e-5)
    for name in ("values", "bias"):
        np.testing.assert_allclose(
            np.broadcast_to(plain[name] / moved[name], (8, 32))[0], scales[:, 0].ravel(), rtol=1e-4
        )

    def lost(p: Any, s: np.ndarray) -> float:
        q = np.asarray(mx_jax.cast(jnp.asarray(p["out"], jnp.float32), "nvfp4", axis=0)) / s
        return float(((q - out) * (moment @ (q - out))).sum())

    assert lost(moved, scales.reshape(-1, 1)) < 0.6 * lost(plain, np.ones((64, 1)))


def test_nothing_moves_without_a_moment():
    plain = params()
    channels = calibrate.llama(plain, tiny.CONFIG.head_width)
    moved, inputs = calibrate.equalize(plain, channels, {}, "mxfp4")
    assert inputs == {}
    np.testing.assert_array_equal(moved.pop("head"), plain["embedding"])
    jax.tree.map(np.testing.assert_array_equal, moved, plain)


@pytest.mark.parametrize("size", [1, 6, 64, 576])
def test_orthogonal(size: int, rng):
    turn = orthogonal(size, rng)
    np.testing.assert_allclose(turn @ turn.T, np.eye(size), atol=1e-12)
    # Powers of two mix all features alike.
    if size == 64:
        np.testing.assert_allclose(np.abs(turn), 1 / 8)


def test_errors():
    plain = params()
    with pytest.raises(ValueError, match="must be those of a Llama, got 'layers_0/qkv/bias'"):
        calibrate.llama({**plain, "layers_0": {"qkv": {"bias": np.ones(3)}}}, 32)
    with pytest.raises(ValueError, match="no parameter is the norm"):
        calibrate.llama({key: w for key, w in plain.items() if key != "norm"}, 32)
    channels = calibrate.llama(plain, 32)
    norm = Pair((Features("norm/scale"), Features("norm/bias")), (Features("head", 1),))
    with pytest.raises(ValueError, match=r"a gain alone.*\['norm/scale', 'norm/bias'\]"):
        calibrate.rotate(plain, dataclasses.replace(channels, norms=(norm,)))
    with pytest.raises(ValueError, match=r"moment.shape=\(3, 3\) of 'layers_0/down' for 96 feat"):
        calibrate.equalize(plain, channels, {"layers_0/down": np.eye(3)}, "mxfp4")
