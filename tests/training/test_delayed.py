"""Delayed scaling: state that a training step overwrites with its gradient."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen.fp8_ops import fp32_max_grad
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from mx_jax.formats import E4M3
from mx_jax.inspect import sqnr_db
from mx_jax.nn.linen import DelayedDotGeneral
from mx_jax.ops.delayed import DelayedState, Scaling, next_state
from tests.quick import quick

STATE = "_overwrite_with_gradient"


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _layer(history_length=4):
    return nn.Dense(
        16, dot_general_cls=functools.partial(DelayedDotGeneral, history_length=history_length)
    )


def test_state_has_the_names_and_shapes_of_flaxs_own():
    x = jnp.ones((2, 32))
    theirs, ours = (
        jax.eval_shape(layer.init, jax.random.key(0), x)
        for layer in (nn.Dense(16, dot_general_cls=nn.Fp8DirectDotGeneralOp), _layer(1024))
    )
    strip = [jax.tree.map(jnp.shape, next(iter(tree[STATE].values()))) for tree in (theirs, ours)]
    assert strip[0] == strip[1]
    assert jax.tree.map(jnp.shape, theirs["params"]) == jax.tree.map(jnp.shape, ours["params"])


def test_a_step_overwrites_the_state_and_the_next_uses_it():
    layer = _layer()
    x = normal(64, 32) * 1000
    target = x[:, :16]
    variables = quick(layer.init)(jax.random.key(1), x)
    train = TrainState.create(apply_fn=layer.apply, params=variables, tx=optax.sgd(0.0))

    @jax.jit
    def step(train):
        def loss(variables):
            return jnp.mean((train.apply_fn(variables, x) - target) ** 2)

        return train.apply_gradients(grads=jax.grad(loss)(train.params))

    exact, apply = x @ np.asarray(variables["params"]["kernel"]), quick(layer.apply)
    first = sqnr_db(exact, apply(train.params, x))
    train = step(train)
    second = sqnr_db(exact, apply(train.params, x))
    state = next(iter(train.params[STATE].values()))
    assert float(state["input_amax_history"][0]) == float(np.abs(x).max())
    # Scale 1 saturates at 448; after one step the history knows better.
    assert first < 15 < 25 < second


def test_gradients_follow_float32s():
    layer = _layer()
    x, g = normal(64, 32), normal(64, 16, seed=1)
    variables = quick(layer.init)(jax.random.key(2), x)

    @quick
    def step(variables, x, g):
        out, pullback = jax.vjp(layer.apply, variables, x)
        return out, *pullback(g)

    for _ in range(2):
        out, bars, x_bar = step(variables, x, g)
        variables = {"params": variables["params"], STATE: bars[STATE]}
    kernel = np.asarray(variables["params"]["kernel"])
    assert sqnr_db(x @ kernel, out) > 25
    assert sqnr_db(g @ kernel.T, x_bar) > 22
    assert sqnr_db(x.T @ g, bars["params"]["kernel"]) > 22


@pytest.mark.parametrize(
    ("scaling", "history", "scale"),
    [
        (Scaling(), [0.0, 0.0], 3.0),
        (Scaling(), [448.0, 896.0], 2.0),
        (Scaling(), [jnp.inf, 1.0], 3.0),
        (Scaling(), [jnp.nan, 1.0], 3.0),
        (Scaling(margin=2), [448.0, 896.0], 8.0),
        (Scaling(margin=-1), [448.0, 896.0], 1.0),
        (Scaling(most_recent=True), [448.0, 896.0], 1.0),
        (Scaling(margin=1, most_recent=True), [448.0, jnp.nan], 2.0),
        (Scaling(most_recent=True), [0.0, 896.0], 3.0),
        # What is no normal float32 is no scale.
        (Scaling(margin=127), [3e38, 1.0], 3.0),
        (Scaling(), [1e-37, 0.0], 3.0),
    ],
    ids=str,
)
def test_the_scale_comes_from_the_history(scaling, history, scale):
    state = DelayedState(jnp.array([3.0]), jnp.array(history))
    new = next_state(jnp.array([[-7.0, 5.0]]), state, E4M3, scaling)
    assert float(new.scale[0]) == scale
    np.testing.assert_array_equal(new.amax_history, np.array([7.0, history[0]], np.float32))


def test_the_layer_has_margin_and_choice():
    x = jnp.ones((2, 32))
    for options, scale in (
        ({"margin": 3}, 16.0),
        ({"amax_compute_algo": "most_recent"}, 1.0),
        ({}, 2.0),
    ):
        operation = functools.partial(DelayedDotGeneral, history_length=2, **options)
        layer = nn.Dense(16, dot_general_cls=operation)
        variables = quick(layer.init)(jax.random.key(0), x)
        (name, state), *_ = variables[STATE].items()
        state = {**state, "input_amax_history": jnp.array([448.0, 896.0])}
        grads = quick(jax.grad(lambda v, layer=layer: apply(layer, v, x).sum()))(
            {**variables, STATE: {name: state}}
        )
        assert float(grads[STATE][name]["input_scale"][0]) == scale


ERRORS = [
    ({"history_length": 0}, ValueError, "history_length must be at least 1, got history_length=0"),
    ({"margin": 0.5}, TypeError, "margin must be an int, a power of two, got margin=0.5"),
    ({"amax_compute_algo": "min"}, ValueError, "'max' or 'most_recent', got amax_compute_algo='m"),
]


@pytest.mark.parametrize(("options", "error", "message"), ERRORS)
def test_errors(options, error, message):
    with pytest.raises(error, match=f"DelayedDotGeneral: .*{message}"):
        DelayedDotGeneral(**options)


def apply(model: nn.Module, variables: Any, x: jax.Array) -> Any:
    return model.apply(variables, x)


class Twice(nn.Module):
    """One layer on inputs of different sizes; what it returns may leave a call out."""

    remat: bool = False

    @nn.compact
    def __call__(self, x):
        layer = (nn.remat(nn.Dense) if self.remat else nn.Dense)(
            32, dot_general_cls=functools.partial(DelayedDotGeneral, history_length=3)
        )
        return layer(x), layer(3 * x), layer(2 * x)


def _largest(tree) -> dict[str, float]:
    (state,) = jax.tree.leaves(tree[STATE], is_leaf=lambda leaf: "input_scale" in leaf)
    assert all(float(state[f"{name}_scale"][0]) == 1.0 for name in ("input", "kernel"))
    return {name: float(state[f"{name}_amax_history"][0]) for name in ("input", "output_grad")}


@pytest.mark.parametrize(
    "compiled",
    [pytest.param(False, id="eager", marks=pytest.mark.slow), pytest.param(True, id="jit")],
)
def test_a_layer_called_several_times_has_the_largest_amax(compiled: bool):
    x = normal(4, 32)
    variables = quick(Twice().init)(jax.random.key(1), x)

    def loss(variables, weights):
        return sum(
            jnp.sum(w * y) for w, y in zip(weights, Twice().apply(variables, x), strict=True)
        )

    grad = quick(jax.grad(loss)) if compiled else jax.grad(loss)
    for weights in ((5.0, 1.0, 2.0), (1.0, 2.0, 5.0)):
        largest = _largest(grad(variables, weights))
        assert largest == {"input": float(3 * np.abs(x).max()), "output_grad": 5.0}


def _as_max(variables):
    """The variables with states of Flax's dtype, which autodiff compares where it would add."""
    states = jax.tree.map(
        lambda leaf: jax.lax.convert_element_type(leaf, fp32_max_grad), variables[STATE]
    )
    return {**variables, STATE: states}


def test_states_of_flaxs_dtype_are_maximal_wherever_they_meet():
    """Below remat every call is a trace of its own."""
    x, model = normal(4, 32), Twice(remat=True)
    variables = quick(model.init)(jax.random.key(1), x)

    @quick
    @jax.grad
    def grad(variables):
        first, second, third = apply(model, _as_max(variables), x)
        return jnp.sum(first * 5 + second + third)

    largest = {"input": float(3 * np.abs(x).max()), "output_grad": 5.0}
    assert _largest(grad(variables)) == largest


class Scanned(nn.Module):
    """One layer for every row."""

    @nn.compact
    def __call__(self, x):
        layer = nn.scan(
            lambda layer, carry, x: (carry, layer(x)),
            variable_broadcast=("params", STATE),
            split_rngs={"params": False},
        )
        return layer(_layer(3), 0.0, x)[1]


class Mapped(nn.Module):
    """One layer for every row, or a layer for each."""

    state_axis: int | None

    @nn.compact
    def __call__(self, x):
        layer = nn.vmap(
            nn.Dense,
            variable_axes={"params": None, STATE: self.state_axis},
            split_rngs={"params": False},
        )
        return layer(16, dot_general_cls=functools.partial(DelayedDotGeneral, history_length=3))(x)


@pytest.mark.slow(but="scan|one each")
@pytest.mark.parametrize(
    "model", [Scanned(), Mapped(None), Mapped(0)], ids=["scan", "vmap, shared", "vmap, one each"]
)
def test_a_state_below_scan_and_vmap_is_of_all_that_share_it(model):
    x = normal(4, 2, 32)
    variables = quick(model.init)(jax.random.key(1), x)
    convert = _as_max if isinstance(model, Scanned) else dict
    grad = quick(jax.grad(lambda v: apply(model, convert(v), x).sum()))
    (state,) = jax.tree.leaves(grad(variables)[STATE], is_leaf=lambda leaf: "input_scale" in leaf)
    rows = np.abs(x).max((1, 2))
    own = getattr(model, "state_axis", None) == 0
    expected = rows if own else rows.max()
    np.testing.assert_array_equal(state["input_amax_history"][..., 0], expected)
    np.testing.assert_array_equal(state["kernel_scale"], jnp.ones((4, 1) if own else (1,)))


@pytest.mark.slow(but="outside|check")
@pytest.mark.parametrize(
    ("check_vma", "outside"),
    [(True, False), (True, True), (False, False)],
    ids=["gradient inside", "gradient outside", "inside, check_vma=False"],
)
def test_below_shard_map_amaxes_are_those_of_all_shards(check_vma: bool, outside: bool):
    """Inputs and cotangents of the shards differ, weights do not; their gradients are summed."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    layer = _layer()
    x = normal(8, 32) * np.arange(1, 9, dtype=np.float32)[:, None]
    variables = quick(layer.init)(jax.random.key(1), x)
    split = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)

    def loss(variables, x):
        y = apply(layer, variables, x)
        weight = (
            1.0 + jax.lax.axis_index("data") if not whole else jnp.repeat(jnp.arange(1.0, 5), 2)
        )
        return jnp.sum(y * jnp.reshape(weight, (-1, 1)))

    def inside(variables, x):
        bars = jax.grad(loss)(variables, x)
        if not check_vma:
            bars["params"] = jax.lax.psum(bars["params"], "data")
        return bars

    def total(variables, x):
        return split(
            lambda v, x: jax.lax.psum(loss(v, x), "data"), in_specs=(P(), P("data")), out_specs=P()
        )(variables, x)

    whole = True
    expected = quick(jax.grad(loss))(variables, x)
    whole = False
    run = jax.grad(total) if outside else split(inside, in_specs=(P(), P("data")), out_specs=P())
    actual = quick(run)(variables, x)
    jax.tree.map(np.testing.assert_array_equal, actual[STATE], expected[STATE])
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4),
        actual["params"],
        expected["params"],
    )
