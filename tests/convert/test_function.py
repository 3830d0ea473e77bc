"""Plain functions, and pytrees of layers, under rules: the numbers of products by hand."""

import dataclasses
import functools
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mx_jax
from mx_jax import convert
from mx_jax.convert import Rule
from mx_jax.ops.ragged_dot import ragged_dot
from mx_jax.recipes import MatmulSpec
from tests.quick import quick

from .helpers import MXFP8, STOCHASTIC, WEIGHT_ONLY, products

RECIPE = MXFP8
ALL = Rule(".*", RECIPE)
BY_HAND = functools.partial(mx_jax.matmul, recipe=RECIPE)
KEY = jax.random.key(3)
_rng = np.random.default_rng(0)
W = jnp.asarray(_rng.standard_normal((2, 32, 32), np.float32) / 6)
X = jnp.asarray(_rng.standard_normal((4, 32), np.float32))
MESH = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,))


def everywhere(dot: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A product in each kind of region, in a scope named after it."""

    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        def named(scope: str, kernel: jax.Array = w[0]) -> Callable[[jax.Array], jax.Array]:
            return jax.named_scope(scope)(lambda x: jnp.tanh(dot(x, kernel)))

        x, _ = lax.scan(lambda x, kernel: (named("scan", kernel)(x), None), x, w, reverse=True)
        x = jax.jit(named("jit"))(x)
        x = jax.checkpoint(named("remat"))(x)
        x = lax.cond(x.sum() > 99, lambda x: x, named("cond"), x)
        x = jax.vmap(named("vmap"))(x[:, None])[:, 0]
        spec = PartitionSpec("rows")
        x = jax.shard_map(named("shard_map"), mesh=MESH, in_specs=spec, out_specs=spec)(x)
        nested = jax.jit(lambda x: lax.cond(x[0, 0] < 9, named("nested"), jnp.cos, x))
        return lax.scan(lambda x, _: (nested(x), None), x, length=2)[0].sum()

    return fn


def decisions(fn: Any, *args: Any, **options: Any) -> dict[str, convert.Decision]:
    entries = convert.report(fn, options.pop("rules", ALL), *args, **options).decisions
    return {decision.layer.path: decision for decision in entries}


@pytest.mark.parametrize(
    "transform",
    [
        pytest.param(lambda fn: fn, id="forward"),
        pytest.param(
            functools.partial(jax.grad, argnums=(0, 1)), id="gradient", marks=pytest.mark.slow
        ),
    ],
)
def test_every_region(transform: Any):
    """Bit for bit what products written with the recipe give."""
    converted = convert.function(everywhere(jnp.matmul), ALL, weights=0)
    ours, theirs = quick(transform(converted))(W, X), quick(transform(everywhere(BY_HAND)))(W, X)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_what_no_rule_matches_is_the_same_program():
    fn = everywhere(jnp.matmul)
    with pytest.warns(convert.UnusedRuleWarning):
        ours = jax.jit(convert.function(fn, Rule("nowhere", RECIPE))).lower(W, X).as_text()
    wrapped = jax.jit(jax.jit(fn)).lower(W, X).as_text()
    assert ours == wrapped


def test_paths():
    """By scope; by number where several share one; without the subscripts of an einsum."""

    def fn(x: jax.Array) -> jax.Array:
        with jax.named_scope("block/pair"):
            x = x @ W[0] @ W[1]
        with jax.named_scope("up"):
            x = jnp.einsum("bk,kn->bn", x, W[0])
        return x @ W[0]

    rules = [
        Rule("block/pair/dot_general_1", None),
        Rule("block/pair", RECIPE),
        Rule("up", RECIPE),
        Rule("", RECIPE),
    ]
    layers = decisions(fn, X, rules=rules)
    assert {path: decision.rule for path, decision in layers.items()} == {
        "block/pair/dot_general_0": 1,
        "block/pair/dot_general_1": 0,
        "up/bk,kn->bn": 2,
        "": 3,
    }


@jax.custom_vjp
def custom_gradient(x: jax.Array) -> jax.Array:
    return jax.named_scope("vjp")(jnp.matmul)(x, W[0])


custom_gradient.defvjp(lambda x: (custom_gradient(x), None), lambda _, g: (g,))


@jax.custom_jvp
def custom_tangent(x: jax.Array) -> jax.Array:
    return jax.named_scope("jvp")(jnp.matmul)(x, W[0])


custom_tangent.defjvps(lambda t, _, x: t)


def test_what_stays_and_why():
    def fn(x: jax.Array) -> Any:
        inner = jax.named_scope("inner")(lambda x: (x @ W[0]).sum())
        counts = jax.named_scope("integers")(jnp.matmul)(jnp.ones((2, 3), int), jnp.ones(3, int))
        outer = jax.named_scope("outer")(jnp.outer)(x[0], x[0])
        into = jax.named_scope("into")(functools.partial(lax.dot, preferred_element_type=int))
        product = lax.dot_general(x, x, (((), ()), ((), ())))
        rest = custom_gradient(x), custom_tangent(x), jax.nn.relu(x), counts, outer, product
        return jax.grad(inner)(x), rest, into(x.astype(jnp.int8), x.astype(jnp.int8).T)

    rules = [ALL, Rule(".*vjp", RECIPE, types=convert.DotGeneral)]
    with pytest.warns(convert.UnusedRuleWarning, match="no layer is converted"):
        reasons = decisions(fn, X, rules=rules)
    assert {path: decision.reason for path, decision in reasons.items()} == {
        "inner/dot_general_0": "of a gradient taken inside: convert what is differentiated, then "
        "differentiate",
        "inner/dot_general_1": "of a gradient taken inside: convert what is differentiated, then "
        "differentiate",
        "vjp": "inside a custom_vjp, whose gradient is its own",
        "jvp": "inside a custom_jvp, whose gradient is its own",
        "integers": "operands of dtype=int32 are not quantized",
        "": "contracts no axis",
        "into": "operands of dtype=int8 are not quantized",
    }


def test_which_operand_is_the_kernel():
    """What comes from weights alone, in loops too; else the right one. Its axes come back."""

    def fn(params: jax.Array, x: jax.Array) -> jax.Array:
        def body(carry: Any, kernel: jax.Array) -> Any:
            h, zeros = carry
            h = ((kernel + zeros).T @ h.T).T
            return (h, zeros), h

        return lax.scan(body, (x, jnp.zeros((32, 1))), params)[1]

    def by_hand(params: jax.Array, x: jax.Array) -> jax.Array:
        def body(h: jax.Array, kernel: jax.Array) -> Any:
            h = mx_jax.matmul(h, kernel, recipe=WEIGHT_ONLY)
            return h, h

        return lax.scan(body, x, params)[1]

    converted = convert.function(fn, Rule(".*", WEIGHT_ONLY), weights="params")
    ours, theirs = quick(converted)(W, X), quick(by_hand)(W, X)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    (decision,) = decisions(fn, W, X, weights=0).values()
    assert (decision.layer.kernel, decision.layer.input) == ((32, 32), (32, 4))
    assert decision.layer.type is convert.DotGeneral

    def carried(params: jax.Array, x: jax.Array) -> jax.Array:
        return lax.scan(lambda h, kernel: (h @ kernel, None), x, params)[0]

    # What is carried is data from the second round on.
    (decision,) = decisions(carried, W, X, weights="x").values()
    assert (decision.layer.kernel, decision.layer.input) == ((32, 32), (4, 32))

    def exchanged(params: jax.Array, x: jax.Array) -> jax.Array:
        return lax.scan(lambda c, _: (c[::-1], c[0] @ c[1]), (params, x), length=2)[1]

    # Either operand is data in some round.
    (decision,) = decisions(exchanged, W[0], W[1], weights=0).values()
    assert decision.layer.of_activations
    with pytest.raises(ValueError, match=r"names arguments that fn was not called with: 'y'"):
        convert.function(fn, ALL, weights=["y", 0])(W, X)


def test_random_bits():
    """A key for each product and iteration, the same for the same stream."""

    def fn(w: jax.Array, x: jax.Array) -> Any:
        stacked = lax.scan(lambda i, _: (i, x @ w), 0, length=2)[1]
        start = (0, x, x)
        looped = lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, s[2], x @ w), start)
        return stacked, x @ w, x @ w, jax.jit(jnp.matmul)(x, w), *looped[1:]

    converted = convert.function(fn, Rule(".*", STOCHASTIC), weights=0)
    products = converted(W[0], X, rngs={"quantize": KEY})
    single = [*products[0], *products[1:]]
    assert len({np.asarray(product).tobytes() for product in single}) == len(single) == 7
    again = converted(W[0], X, rngs={"quantize": KEY})
    jax.tree.map(np.testing.assert_array_equal, products, again)
    # The report of the very same call.
    results = decisions(converted, W[0], X, rules=converted.rules, rngs={"quantize": KEY})
    assert {result.recipe for result in results.values()} == {STOCHASTIC}
    other = converted(W[0], X, rngs={"quantize": jax.random.key(4)})
    assert np.any(other[1] != products[1])
    with pytest.raises(ValueError, match=r"needs the 'quantize' stream; call fn\(..., rngs="):
        converted(W[0], X)
    with pytest.raises(TypeError, match=r"the function has no argument rngs, so only the stream"):
        converted(W[0], X, rngs={"dropout": KEY})


def test_shards_draw_different_bits():
    """Where they hold other rows; of a kernel that all hold alike, each the same."""

    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        spec = PartitionSpec("rows")
        return jax.shard_map(lambda x: x @ w, mesh=MESH, in_specs=spec, out_specs=spec)(x)

    eye = jnp.eye(32)
    x = jnp.tile(X[:1], (2, 1))
    recipe = dataclasses.replace(STOCHASTIC, output=MatmulSpec(lhs=STOCHASTIC.output.rhs, rhs=None))
    converted = convert.function(fn, Rule(".*", recipe), weights=0)
    first, second = converted(eye, x, rngs={"quantize": KEY})
    assert np.any(first != second)


def test_calls_are_traced_once():
    """As jit: again for other shapes, and for other values of what is no array."""
    traced: list[Any] = []

    def fn(w: jax.Array, x: jax.Array, *, by: Any = 1.0) -> Any:
        traced.append(by)
        return {"out": x @ w * by, "none": None}

    # Kept products compile quickly.
    kept = Rule(".*", None)
    converted = convert.function(fn, kept, weights=0)
    for _ in range(2):
        for by in (0.0, -0.0, 1, True):
            assert converted(W[0], X, by=by)["none"] is None
    assert [repr(by) for by in traced] == ["0.0", "-0.0", "1", "True"]
    converted(W[0], X[:2])
    assert len(traced) == 5
    step = jax.jit(lambda x: converted(W[0], x)["out"])
    for _ in range(2):
        step(X)
    assert len(traced) == 6
    sets = convert.function(lambda x, names: x @ W[0] * len(names), kept)
    assert np.all(sets(X, {1, 2}) == 2 * sets(X, {1})), "they have no hash"
    assert convert.function(converted, [], weights=0).function is fn
    assert pickle.loads(pickle.dumps(convert.function(loss_of_tree, ALL))).rules == (ALL,)


def test_rules_that_match_nothing():
    """Told of when the function is traced, unless they matched before."""

    def fn(x: jax.Array, flag: bool) -> jax.Array:
        return jax.named_scope("a" if flag else "b")(jnp.matmul)(x, W[0])

    rules = [Rule("a", RECIPE), Rule("b", RECIPE)]
    converted = convert.function(fn, rules)
    with pytest.warns(convert.UnusedRuleWarning, match="1 \\('b'\\); the model has 'a'"):
        converted(X, True)
    converted(X, False)


def test_the_cause_is_said():
    """Of products that a rule matches and nothing converts; of others patterns are the cause."""

    def step(x, w):
        return jax.grad(lambda w: jnp.sum(x @ w))(w)

    cannot = "they match what cannot be converted: "
    for pattern, cause in (
        (".*", f"{cannot}'dot_general_0', 'dot_general_1': of a gradient taken inside"),
        ("dot_general_1", f"{cannot}'dot_general_1': of a gradient"),
        ("head", "'dot_general_1'; patterns match whole paths"),
    ):
        with pytest.warns(convert.UnusedRuleWarning, match=cause):
            convert.function(step, Rule(pattern, RECIPE))(X, W[0])


def test_ragged_products_and_convolutions():
    sizes = jnp.array([1, 3])
    converted = convert.function(lax.ragged_dot, ALL, weights=1)
    np.testing.assert_array_equal(
        converted(X, W, sizes), jax.jit(functools.partial(ragged_dot, recipe=RECIPE))(X, W, sizes)
    )
    image = jnp.asarray(_rng.standard_normal((1, 32, 4, 4), np.float32))
    kernel = jnp.asarray(_rng.standard_normal((3, 32, 2, 2), np.float32))

    def conv(image: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.conv(image, kernel, (2, 2), "VALID")

    with pytest.warns(convert.UnusedRuleWarning, match="a rule with types=convert.Conv converts"):
        convert.function(conv, ALL)(image, kernel)
    rules = Rule(".*", RECIPE, types=convert.Conv)
    (decision,) = decisions(conv, image, kernel, rules=rules).values()
    assert (decision.layer.shape, decision.layer.type) == ((4, 32, 3), convert.Conv)
    assert products(convert.function(conv, rules), image, kernel) == {"mx_matmul": 1}


def test_sums_in_groups_stay():
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=(0,),
        rhs_group_dimensions=(),
    )
    sums = functools.partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=numbers)
    with pytest.warns(convert.UnusedRuleWarning):
        (decision,) = decisions(sums, X, X, jnp.array([1, 3])).values()
    assert decision.reason == "no product of rows in groups, as jax.lax.ragged_dot makes it"


def test_a_recipe_of_weights_alone():
    """It leaves a product of two activations, where it is said which arguments are weights."""

    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        with jax.named_scope("scores"):
            scores = x @ x.T
        with jax.named_scope("mix"):
            return scores @ (x @ w)

    rules = [Rule(".*", WEIGHT_ONLY), Rule("scores", RECIPE)]
    layers = decisions(fn, W[0], X, rules=rules, weights=0)
    assert {path: decision.rule for path, decision in layers.items()} == {
        "scores": 1,
        "mix/dot_general_0": 0,
        "mix/dot_general_1": None,
    }
    reason = "rule 0: its recipe quantizes weights alone, and neither operand is one"
    assert layers["mix/dot_general_1"].reason == reason
    assert {decision.rule for decision in decisions(fn, W[0], X, rules=rules[:1]).values()} == {0}


@pytest.mark.slow
def test_below_other_transformations():
    """vmap, sharded arguments, donated ones, effects, nothing to return, arrays of no size."""
    fn = jax.named_scope("up")(jnp.matmul)
    converted = convert.function(fn, ALL, weights=1)
    rows = jax.jit(jax.vmap(converted, (0, None)))(X[:, None], W[0])[:, 0]
    np.testing.assert_allclose(rows, jax.jit(BY_HAND)(X, W[0]), rtol=1e-6, atol=1e-6)
    sharded = jax.device_put(X, NamedSharding(MESH, PartitionSpec("rows")))
    np.testing.assert_array_equal(jax.jit(converted)(sharded, W[0]), jax.jit(BY_HAND)(X, W[0]))
    donating = jax.jit(converted, donate_argnums=0)
    np.testing.assert_array_equal(donating(X + 0, W[0]), jax.jit(BY_HAND)(X, W[0]))
    assert converted(X[:0], W[0]).shape == (0, 32)
    np.testing.assert_array_equal(converted(X[:, :0], W[0][:0]), np.zeros((4, 32)))
    half = converted(X.astype(jnp.bfloat16), W[0].astype(jnp.bfloat16))
    assert half.dtype == jnp.bfloat16


def test_effects_stay(capfd: pytest.CaptureFixture[str]):
    def fn(x: jax.Array) -> None:
        def step(x: jax.Array, i: jax.Array) -> Any:
            x = x @ W[0]
            jax.debug.print("step {}", i)
            return x, None

        lax.scan(step, x, jnp.arange(2))

    assert convert.function(fn, ALL)(X) is None
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.split("\n")) == ["", "step 0", "step 1"]


def test_equal_calls_stay_one_function():
    @jax.jit
    @jax.named_scope("layer")
    def layer(x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ W[0])

    def fn(x: jax.Array) -> jax.Array:
        with jax.named_scope("first"):
            x = layer(x)
        return layer(layer(x))

    converted = convert.function(fn, Rule(".*layer", WEIGHT_ONLY))
    text = jax.jit(converted).lower(X).as_text()
    assert text.count("call @layer") == 3 and text.count("func.func private @layer") == 1
    # Not where rules tell them apart.
    converted = convert.function(fn, Rule("first/layer", WEIGHT_ONLY))
    assert jax.jit(converted).lower(X).as_text().count("func.func private @layer") == 2


def test_explicit_axes_and_other_platforms():
    """Where the kernel is on the left the product's sharding turns too."""
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Explicit,))

    def transposed(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.einsum("kn,bk->nb", w, x, out_sharding=PartitionSpec(None, "rows"))

    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("rows", None)))
        product = quick(convert.function(transposed, Rule(".*", WEIGHT_ONLY), weights=0))(W[0], x)
        assert jax.typeof(product).sharding.spec == PartitionSpec(None, "rows")
    by_hand = quick(functools.partial(mx_jax.matmul, recipe=WEIGHT_ONLY))(X, W[0]).T
    np.testing.assert_allclose(product, by_hand, rtol=1e-5, atol=1e-6)

    def here(x: jax.Array) -> jax.Array:
        return lax.platform_dependent(x, cpu=lambda x: x @ W[0], default=lambda x: 0 * x)

    ours = quick(convert.function(here, Rule(".*", WEIGHT_ONLY)))(X)
    np.testing.assert_allclose(ours, by_hand.T, rtol=1e-5, atol=1e-6)


def test_what_is_closed_over_may_be_differentiated():
    def loss(w: jax.Array, converting: bool) -> jax.Array:
        def fn(x: jax.Array) -> jax.Array:
            return jnp.tanh(x @ w).sum()

        if not converting:
            return jnp.tanh(BY_HAND(X, w)).sum()
        return convert.function(fn, ALL)(X)

    ours = jax.jit(jax.grad(functools.partial(loss, converting=True)))(W[0])
    theirs = jax.jit(jax.grad(functools.partial(loss, converting=False)))(W[0])
    np.testing.assert_array_equal(ours, theirs)


def test_x64():
    with jax.enable_x64(True):
        converted = convert.function(lambda x: (x @ x.T, x.astype(float) @ x.T), ALL)
        with pytest.warns(convert.UnusedRuleWarning):
            result = decisions(lambda x: x.astype(float) @ x.T, X)
        assert "dtype=float64" in result[""].reason
        low, high = converted(X)
    assert (low.dtype, high.dtype) == (jnp.float32, jnp.float64)


def test_a_function_that_has_no_signature():
    product = convert.function(functools.partial(functools.reduce, jnp.matmul), ALL)
    np.testing.assert_allclose(quick(product)([X, W[0]]), quick(BY_HAND)(X, W[0]), rtol=1e-5)


# Pytrees of layers --------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TreeLinear:
    """As Equinox has it: of one example, a kernel `[out, in]`. test_peers.py runs the real ones."""

    weight: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.weight @ x


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Model:
    layers: list[Any]
    rest: dict[str, Any]

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        x = x @ (self.rest["low"]["a"] @ self.rest["low"]["b"])
        return x @ self.rest["tied"] @ self.rest["tied"].T @ self.rest["head"]


def tree_model() -> Model:
    rest = {"low": {"a": W[0], "b": W[1]}, "tied": W[0] + 1, "head": W[1] + 1}
    return Model([TreeLinear(W[0]), TreeLinear(W[1])], rest)


def loss_of_tree(x: jax.Array, *, model: Model) -> jax.Array:
    return jnp.sum(jax.vmap(model)(x) ** 2)


def test_products_are_named_by_what_holds_their_kernels():
    report = convert.report(loss_of_tree, ALL, X, model=tree_model(), weights="model")
    layers = [decision.layer for decision in report.decisions]
    assert [(layer.path, layer.type) for layer in layers] == [
        ("layers/0", TreeLinear),
        ("layers/1", TreeLinear),
        *((f"dot_general_{i}", convert.DotGeneral) for i in (2, 3, 4, 5, 6)),
    ]
    assert all(layer.shape == (32, 32) for layer in layers)


@pytest.mark.parametrize(
    ("pattern", "types", "names"),
    [
        ("layers/0", None, ["layers/0"]),
        ("layers/0/weight", None, ["layers/0"]),
        (".*", TreeLinear, ["layers/0", "layers/1"]),
        ("rest/low", None, ["dot_general_2", "dot_general_3"]),
        ("rest/low/b", None, ["dot_general_2"]),
        ("rest/tied", None, ["dot_general_4", "dot_general_5"]),
        ("rest", None, [f"dot_general_{i}" for i in (4, 5, 6)]),
    ],
)
def test_rules_go_by_the_paths_of_weights(pattern: str, types: Any, names: list[str]):
    """Of one weight by its own path too; of several by that of the node that holds them all."""
    rule = Rule(pattern, RECIPE, types=types)
    report = convert.report(loss_of_tree, rule, X, model=tree_model(), weights="model")
    assert [decision.layer.path for decision in report.decisions if decision.recipe] == names


def test_products_of_the_batch():
    converted = convert.function(loss_of_tree, ALL, weights="model")
    gradient = jax.grad(lambda model: converted(X, model=model))
    # No gradient of a kernel for each example, `[batch, out, in]`.
    assert "f32[4,32,32]" not in str(jax.make_jaxpr(gradient)(tree_model()))
