"""quantize_state: moments in MXFP8, right on average, wherever optax's own states may be."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mx_jax
from mx_jax import optimizer as of
from mx_jax.codecs.rounding import STOCHASTIC
from mx_jax.formats import MXFP8_E4M3
from mx_jax.reference.quantize import quantize as reference_quantize
from mx_jax.reference.scale_rules import RCEIL
from tests.nn.layers import assert_trees_equal
from tests.quick import quick
from tests.sharding.collectives import collectives

WORDS = jnp.array([0x1234567, 0x89ABCDE], jnp.uint32)
BLOCKS = ((-1, 32),)
encode = jax.jit(of.encode, static_argnums=2)
decode = jax.jit(of.decode, static_argnums=(2, 3))


def encoded(x: jax.Array, root: bool, words: jax.Array = WORDS) -> mx_jax.MXArray:
    """What a step stores, as the array that it stands for."""
    x = jnp.asarray(x)
    codes, scales = encode(x, words, root)
    blocks = of.blocks_of(x.shape)
    return mx_jax.MXArray(
        codes=codes, scales=scales, format=MXFP8_E4M3, blocks=blocks, dtype=np.dtype(x.dtype)
    )


def decoded(stored: mx_jax.MXArray, root: bool) -> jax.Array:
    return decode(stored.codes, stored.scales, root, stored.dtype)


def nbytes(state: Any, name: str) -> int:
    """Of a moment: codes and scales."""
    return sum(each[0].mu[name].size for each in (state.state, state.scales))


def params_of(seed: int = 0) -> dict[str, jax.Array]:
    kernel = 0.1 * jax.random.normal(jax.random.key(seed), (64, 128))
    return {"kernel": kernel, "bias": jnp.zeros(128)}


def loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(jnp.tanh(x @ params["kernel"] + params["bias"]) - x[:, :1]))


def step_of(optimizer: Any) -> Any:
    """`step((params, state), number)` as scan takes it."""

    def step(carry: Any, number: jax.Array) -> Any:
        params, state = carry
        x = jax.random.normal(jax.random.fold_in(jax.random.key(7), number), (16, 64))
        gradients = jax.grad(loss)(params, x)
        updates, state = optimizer.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), None

    return step


def run(optimizer: Any, steps: int = 6, jit: Any = quick) -> Any:
    start = params_of()
    state = jit(optimizer.init)(start)
    return jit(lambda c: jax.lax.scan(step_of(optimizer), c, jnp.arange(steps))[0])((start, state))


def spread(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers whose sizes within a block differ by four decades."""
    sizes = 10.0 ** np.resize(np.linspace(-4, 0, 32), shape)
    return (rng.standard_normal(shape) * sizes).astype(np.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_values_are_rounded_as_quantize_rounds_by_the_same_bits(dtype, rng):
    x = jnp.asarray(spread(rng, (64, 96))).astype(dtype)
    ours = encoded(x, root=False)
    bits = of.random_bits(x, WORDS) >> 4  # it takes 16
    quantize = quick(reference_quantize, static_argnums=(1, 2, 3, 4))
    theirs = quantize(x, MXFP8_E4M3, BLOCKS, RCEIL, STOCHASTIC, bits)
    np.testing.assert_array_equal(ours.scales, theirs.scales)
    # Odds of 2^-16 may differ in their last bit.
    apart = np.asarray(ours.codes).astype(int) - np.asarray(theirs.codes).astype(int)
    assert np.count_nonzero(apart) <= 2 and np.abs(apart).max() <= 1
    np.testing.assert_array_equal(decoded(ours, root=False), ours.dequantize())


def test_roots_are_read_back_as_their_squares(rng):
    x = jnp.square(jnp.asarray(spread(rng, (64, 96))))
    stored = encoded(x, root=True)
    codes = np.asarray(stored.codes)
    assert codes.min() >= 8 and codes.max() <= 126  # normal, positive, finite
    squares = np.square(np.asarray(stored.dequantize()))
    np.testing.assert_array_equal(decoded(stored, root=True), squares)


@pytest.mark.parametrize("root", [False, True], ids=["values", "squares"])
def test_both_are_right_on_average(root, rng):
    x = spread(rng, (4, 32))
    x = np.square(np.where(abs(x) < 2e-4, 2e-4, x)) if root else x
    words = jax.random.bits(jax.random.key(3), (8192, 2), jnp.uint32)
    draw = jax.jit(jax.vmap(lambda each: decoded(encoded(x, root, each), root)))
    result = np.asarray(draw(words), np.float64)
    error = np.abs(result.mean(axis=0) - x) / (result.std(axis=0) / 8192**0.5 + 1e-5 * np.abs(x))
    assert error.max() < 5
    # Every one lies between neighbouring codes, and not all are the same.
    assert all(len(np.unique(column)) <= 2 for column in result.reshape(8192, -1).T)
    assert result.std(axis=0).max() > 0


def test_random_bits_are_uniform_and_independent():
    x = jnp.zeros((64, 1024))
    words = jax.random.bits(jax.random.key(1), (64, 2), jnp.uint32)
    bits = np.asarray(quick(jax.vmap(functools.partial(of.random_bits, x)))(words)).reshape(64, -1)
    assert bits.min() >= 0 and bits.max() < 2**20
    centred = (bits + 0.5) / 2**20 - 0.5
    limit = 5 / (12 * centred.shape[1] ** 0.5)
    assert np.abs(centred.mean(axis=1)).max() < limit * 12**0.5
    for lag in (1, 16, 32, 1024):
        together = (centred[:, lag:] * centred[:, :-lag]).mean(axis=1)
        assert np.abs(together).max() < limit
    assert np.abs((centred[1:] * centred[:-1]).mean(axis=1)).max() < limit


def test_bits_are_those_of_the_position_in_memory():
    draw = quick(of.random_bits)
    flat, shaped = (np.asarray(draw(jnp.zeros(s), WORDS)) for s in (3 * 5 * 64, (3, 5, 64)))
    np.testing.assert_array_equal(shaped.reshape(-1), flat)


def test_bytes_and_what_stays():
    params = params_of() | {"tall": jnp.ones((4096, 3, 3)), "odd": jnp.ones((70, 70))}
    state: Any = jax.eval_shape(mx_jax.quantize_state(optax.adamw(1e-3)).init, params)
    assert nbytes(state, "kernel") == 64 * 128 * 33 // 32
    assert nbytes(state, "tall") == 4096 * 9 * 33 // 32  # blocks along the only axis of whole ones
    assert nbytes(state, "odd") == 70 * 70 + 70 * 3  # a last partial block
    for moments in (state.state[0].mu, state.state[0].nu):
        assert moments["kernel"].dtype == jnp.uint8 and moments["kernel"].shape == (64, 128)
        assert moments["bias"].dtype == jnp.float32 and moments["bias"].shape == (128,)
    least: Any = jax.eval_shape(mx_jax.quantize_state(optax.adamw(1e-3), min_size=128).init, params)
    assert least.state[0].mu["bias"].dtype == jnp.uint8


def test_specs_of_parameters_reach_codes_and_scales():
    optimizer = mx_jax.quantize_state(optax.adamw(1e-3))
    state = quick(optimizer.init)(params_of())
    specs = {"kernel": "of kernel", "bias": "of bias"}
    result: Any = optax.tree_map_params(
        optimizer, lambda leaf, spec: spec, state, specs, transform_non_params=lambda leaf: None
    )
    assert result.state[0].nu == result.scales[0].nu == specs


@pytest.mark.parametrize("root", [False, True], ids=["values", "squares"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, "negative"])
def test_what_is_no_number_makes_its_block_nan(root, bad):
    x = np.ones((2, 64), np.float32)
    x[0, 3] = -1.0 if bad == "negative" else bad
    stored = encoded(x, root)
    result = np.asarray(decoded(stored, root))
    if bad == "negative" and not root:
        np.testing.assert_array_equal(result, x)
    else:
        assert np.isnan(result[0, :32]).all()
        np.testing.assert_array_equal(result[:, 32:], 1)
        np.testing.assert_array_equal(np.isnan(stored.dequantize()), np.isnan(result))


@pytest.mark.parametrize("size", [1e-30, 1e-4, 448.0, 1e30])
def test_sizes_far_from_one(size):
    x = jnp.full((1, 32), size, jnp.float32)
    for root, step in ((False, 1 + 1 / 8), (True, (1 + 1 / 8) ** 2)):
        result = decoded(encoded(x, root), root)
        assert (result < step * x).all() and (result > x / step).all()


def test_loss_falls_as_in_float32():
    adam = optax.adamw(1e-2)
    (exact, _), (ours, _) = run(adam, 60), run(mx_jax.quantize_state(adam), 60)
    x = jax.random.normal(jax.random.key(9), (256, 64))
    before, after, quantized = (float(loss(p, x)) for p in (params_of(), exact, ours))
    assert after < 0.7 * before
    assert quantized == pytest.approx(after, rel=0.03)


def test_scan_and_donated_steps_give_the_same_bits():
    optimizer = mx_jax.quantize_state(optax.adamw(1e-2), key=jax.random.key(5))
    step = jax.jit(lambda carry, number: step_of(optimizer)(carry, number)[0], donate_argnums=0)
    carry: Any = params_of(), quick(optimizer.init)(params_of())
    for number in range(6):
        carry = step(carry, jnp.asarray(number))
    assert_trees_equal(carry, run(optimizer, jit=jax.jit))
    keys = (mx_jax.quantize_state(optax.adamw(1e-2), key=jax.random.key(i)) for i in (5, 6))
    one, other = (step((params_of(), quick(each.init)(params_of())), 0)[1] for each in keys)
    assert (other.state[0].mu["kernel"] != one.state[0].mu["kernel"]).any()


def test_the_callers_key_survives_donation():
    key = jax.random.PRNGKey(0)  # raw words, which the state could be handed as they are
    optimizer = mx_jax.quantize_state(optax.sgd(1e-2, momentum=0.9), key=key)
    step = jax.jit(lambda carry: step_of(optimizer)(carry, 0)[0], donate_argnums=0)
    step((params_of(), optimizer.init(params_of())))
    optimizer.init(params_of())
    np.testing.assert_array_equal(key, jax.random.PRNGKey(0))


def test_a_step_holds_no_moment_in_float32():
    """XLA computes moments where it reads and rounds them."""
    optimizer = mx_jax.quantize_state(optax.adamw(1e-2))
    kernel = {"kernel": jax.ShapeDtypeStruct((512, 1024), jnp.float32)}
    state = jax.eval_shape(optimizer.init, kernel)
    program = jax.jit(optimizer.update).lower(kernel, state, kernel).compile()
    assert program.memory_analysis().temp_size_in_bytes < 4 * 512 * 1024


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda: optax.MultiSteps(mx_jax.quantize_state(optax.adamw(1e-2)), 2),
        lambda: mx_jax.quantize_state(
            optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation()
        ),
        lambda: optax.inject_hyperparams(lambda rate: mx_jax.quantize_state(optax.adamw(rate)))(
            rate=optax.linear_schedule(0.0, 1e-2, 4)
        ),
        lambda: optax.masked(
            mx_jax.quantize_state(optax.lion(1e-3)), {"kernel": True, "bias": False}
        ),
        lambda: mx_jax.quantize_state(optax.contrib.schedule_free_adamw(1e-2)),
    ],
    ids="multi_steps of_multi_steps inject masked schedule_free".split(),
)
def test_composes(wrapped):
    optimizer = wrapped()
    params, state = run(optimizer)
    assert any(x.dtype == jnp.uint8 and x.shape == (64, 128) for x in jax.tree.leaves(state))
    assert jax.tree.structure(state) == jax.tree.structure(jax.eval_shape(optimizer.init, params))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    assert (params["kernel"] != params_of()["kernel"]).any()


def test_further_arguments_reach_the_optimizer():
    optimizer = mx_jax.quantize_state(
        optax.chain(optax.adamw(1e-2), optax.contrib.reduce_on_plateau(patience=1))
    )
    params = params_of()
    state = jax.eval_shape(optimizer.init, params)
    with pytest.raises(TypeError, match="value"):
        jax.eval_shape(optimizer.update, params, state, params)
    result = jax.eval_shape(functools.partial(optimizer.update, value=3.0), params, state, params)
    assert jax.tree.structure(result[1]) == jax.tree.structure(state)


def test_nnx_optimizer():
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, mx_jax.quantize_state(optax.adamw(1e-2)), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        gradients = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, gradients)

    before = model.kernel[...].copy()
    step(model, optimizer, jnp.ones((4, 64)))
    step(model, optimizer, jnp.ones((4, 64)))
    assert (model.kernel[...] != before).any()


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_sharded_as_its_parameters_without_a_collective(types):
    mesh = jax.make_mesh((4, 2), ("fsdp", "model"), axis_types=(types, types))
    place = {"kernel": NamedSharding(mesh, P("fsdp", "model")), "bias": NamedSharding(mesh, P())}
    gradients = params_of(1)
    single = mx_jax.quantize_state(optax.adamw(1e-2))
    expected: Any = jax.jit(single.update)(gradients, quick(single.init)(params_of()), params_of())
    with jax.set_mesh(mesh):
        params, placed = (jax.device_put(tree, place) for tree in (params_of(), gradients))
        state: Any = single.init(params)
        program = jax.jit(single.update).lower(placed, state, params).compile()
        result: Any = program(placed, state, params)
    assert not collectives(program.as_text() or "")
    for after in (state, result[1]):
        for tree in (after.state[0], after.scales[0]):
            for moments in (tree.mu, tree.nu):
                assert moments["kernel"].sharding.is_equivalent_to(place["kernel"], 2)
    assert_trees_equal(result[1], expected[1])
    np.testing.assert_allclose(result[0]["kernel"], expected[0]["kernel"], rtol=1e-6)


def test_orbax_saves_and_resumes_bit_for_bit(tmp_path: Path):
    optimizer = mx_jax.quantize_state(optax.adamw(1e-2))
    step = quick(lambda carry, number: step_of(optimizer)(carry, number)[0])
    carry = params_of(), quick(optimizer.init)(params_of())
    for number in range(3):
        carry = step(carry, jnp.asarray(number))
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=ocp.args.StandardSave(carry))
        manager.wait_until_finished()
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        like = jax.eval_shape(lambda: (params_of(), optimizer.init(params_of())))
        like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), like
        )
        restored = manager.restore(3, args=ocp.args.StandardRestore(like))
    assert_trees_equal(restored, carry)
    for number in range(3, 6):
        carry, restored = (step(c, jnp.asarray(number)) for c in (carry, restored))
    assert_trees_equal(restored, carry)


def test_an_update_may_ask_for_values():
    """Outside of jit, as optax's own may; and without parameters moments are float32."""
    base = optax.adam(1e-2)

    def update(updates, state, params=None):
        if state[0].count % 2:
            updates = jax.tree.map(jnp.zeros_like, updates)
        return base.update(updates, state, params)

    optimizer = mx_jax.quantize_state(optax.GradientTransformation(base.init, update))
    state = optimizer.init(params_of())
    updates: Any = None
    for _ in range(2):
        updates, state = optimizer.update(params_of(1), state)
    assert np.isfinite(updates["kernel"]).all()
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params_of(1))
    optimizer = mx_jax.quantize_state(base)
    state = jax.eval_shape(optimizer.init, params_of())
    wide: Any = jax.eval_shape(optimizer.update, narrow, state)[0]
    assert wide["kernel"].dtype == jnp.float32
    updates, _ = jax.eval_shape(
        optimizer.update, narrow, jax.eval_shape(optimizer.init, narrow), narrow
    )
    assert updates["kernel"].dtype == jnp.bfloat16


def test_errors_name_the_remedy():
    with pytest.raises(TypeError, match=r"got optimizer of type MultiSteps; .*gradient_transform"):
        mx_jax.quantize_state(optax.MultiSteps(optax.adam(1e-3), 2))
    with pytest.raises(ValueError, match="min_size must be an int of at least 0, got min_size=-1"):
        mx_jax.quantize_state(optax.adam(1e-3), min_size=-1)
    with pytest.raises(ValueError, match=r"got values=\('mu', 'trace'\), squares=\('nu',\)"):
        mx_jax.quantize_state(optax.adagrad(1e-3)).init(params_of())
    with pytest.raises(TypeError, match=r"quantize_state: key must be one PRNG key .*shape=\(2,\)"):
        mx_jax.quantize_state(optax.sgd(1e-3), key=jax.random.split(jax.random.key(0)))
    # Nothing large: nothing to quantize, and nothing to say. No moments: likewise.
    mx_jax.quantize_state(optax.adagrad(1e-3)).init({"bias": jnp.zeros(64)})
    mx_jax.quantize_state(optax.sgd(1e-3)).init(params_of())
    named = mx_jax.quantize_state(optax.adagrad(1e-3), squares=("sum_of_squares",))
    state: Any = named.init(params_of())
    assert state.state[0].sum_of_squares["kernel"].dtype == jnp.uint8


@pytest.mark.parametrize("others", [{"a": 1}, {"a": 1, "b": 1, "c": 1}], ids=["fewer", "more"])
def test_an_update_of_other_parameters(others: dict[str, int]):
    """Said by name, with parameters given or not."""
    optimizer = mx_jax.quantize_state(optax.adam(1e-3))
    state = optimizer.init({name: jnp.ones((64, 128)) for name in "ab"})
    params = {name: jnp.ones((64, 128)) for name in others}
    names = "missing=.*'b'.* new=\\[\\]" if len(others) == 1 else "missing=\\[\\], new=.*'c'"
    for source in (params, None):
        with pytest.raises(ValueError, match=f"quantize_state: update needs the tree .*{names}"):
            optimizer.update(params, state, source)
