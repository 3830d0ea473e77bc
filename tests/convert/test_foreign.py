"""Layers that are not Flax's and multiply by name: converted where a rule names their type."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import mx_jax
from mx_jax import convert, recipes
from mx_jax.convert import Rule
from mx_jax.convert.functions import TracedCall
from mx_jax.testing.compare import assert_bitwise_equal
from tests.quick import quick

WEIGHT_ONLY = recipes.weight_only("mxfp4")
X = np.random.default_rng(1).standard_normal((2, 3, 40), np.float32)


class Einsum(nn.Module):
    """As language models have it: subscripts come with the call."""

    shape: tuple[int, ...]

    @nn.compact
    def __call__(self, subscripts: str, x: jax.Array) -> jax.Array:
        w = self.param("w", nn.initializers.normal(), self.shape)
        return jnp.einsum(subscripts, x, w)


class Table(nn.Module):
    """A table with two methods, only one of which multiplies."""

    def setup(self):
        self.table = self.param("table", nn.initializers.normal(), (7, 40))

    def look_up(self, tokens):
        return self.table[tokens]

    def __call__(self, x):
        return self.attend(x)

    def attend(self, x):
        return x @ self.table.T


LINEN = Rule(".*", WEIGHT_ONLY, types=Einsum)


class TestLinen:
    @pytest.mark.slow
    def test_inside_scan_and_jit(self):
        class Stack(nn.Module):
            @nn.compact
            def __call__(self, x):
                def body(layer, x, _):
                    return layer("btd,df->btf", x), None

                stack = nn.scan(
                    body, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
                )
                return stack(Einsum((40, 40), name="layers"), x, None)[0]

        model = Stack()
        variables = quick(model.init)(jax.random.key(0), X)
        result = jax.jit(convert.linen(model, LINEN).apply)(variables, X)
        expected = X
        for w in variables["params"]["layers"]["w"]:
            expected = mx_jax.einsum("btd,df->btf", expected, w, recipe=WEIGHT_ONLY)
        np.testing.assert_allclose(result, expected, rtol=1e-5)

    def test_every_method_that_multiplies(self):
        model, rule = Table(), Rule(".*", WEIGHT_ONLY, types=Table)
        variables = quick(model.init)(jax.random.key(0), X)
        converted = convert.linen(model, rule)
        table = variables["params"]["table"]
        expected = mx_jax.matmul(X, table.T, recipe=WEIGHT_ONLY)
        np.testing.assert_array_equal(converted.apply(variables, X), expected)
        attended = converted.apply(variables, X, method="attend")
        np.testing.assert_array_equal(attended, expected)
        tokens = jnp.arange(3)
        looked_up = converted.apply(variables, tokens, method="look_up")
        np.testing.assert_array_equal(looked_up, table[:3])

    def test_obstacles(self):
        class Outer(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(3)(x) @ self.param("w", nn.initializers.ones, (3, 4))

        with pytest.warns(convert.UnusedRuleWarning):
            report = convert.report(Outer(), Rule("", WEIGHT_ONLY, types=Outer), X)
        assert {d.layer.path: d.reason for d in report.decisions} == {
            "Dense_0": "no rule matches",
            "": "has layers of its own: Dense_0",
        }


class TestNnx:
    def test_obstacles(self):
        class Holder(nnx.Module):
            def __init__(self, rngs: nnx.Rngs):
                self.w = nnx.Param(jnp.ones((3, 4)))

        class Outer(nnx.Module):
            def __init__(self, rngs: nnx.Rngs):
                self.w = nnx.Param(jnp.ones((3, 4)))
                self.holder = Holder(rngs)

        with pytest.warns(convert.UnusedRuleWarning):
            report = convert.report(Outer(nnx.Rngs(0)), Rule(".*", WEIGHT_ONLY, types=nnx.Module))
        assert {d.layer.path: d.reason for d in report.decisions} == {
            "holder": "is not callable",
            "": "has layers of its own: holder",
        }


SUMS_IN_GROUPS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=(0,),
    rhs_group_dimensions=(),
)


class TestTracedCall:
    """On functions."""

    W = jax.random.normal(jax.random.key(2), (5, 3, 40))

    @staticmethod
    def seen(function: Any, *args: Any) -> list[tuple[int, ...]]:
        """Shapes of the right operands; the values have to stay what they were."""
        kernels = []

        def multiply(lhs, rhs, dimension_numbers, *, key, **options):
            kernels.append(rhs.shape)
            return lax.dot_general(lhs, rhs, dimension_numbers, **options)

        run = TracedCall(WEIGHT_ONLY)
        results = run(function, args, {}, name="f", dot_general=lambda recipe: multiply)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
            results,
            function(*args),
        )
        return kernels

    def test_the_kernel_is_on_the_right(self):
        w = self.W
        assert self.seen(lambda x: jnp.einsum("btd,fhd->btfh", x, w), X) == [w.shape]
        assert self.seen(lambda x: jnp.einsum("fhd,btd->fhbt", w, x), X) == [w.shape]
        # A batch axis in both; the kernel first.
        assert len(self.seen(lambda x: jnp.einsum("fhd,bhd->bhf", w, x), X)) == 1
        assert self.seen(lambda x: jnp.tanh(2 * w[0]) @ x[0].T, X) == [(3, 40)]

    def test_inside_jit_and_several(self):
        def function(x):
            y = jax.jit(lambda x: jax.nn.gelu(x @ self.W[0].T))(x)
            return {"y": y, "z": jax.nn.softmax(y) @ self.W[1]}

        assert self.seen(function, X) == [(40, 3), (3, 40)]

    def test_inside_loops(self):
        def function(x):
            x = lax.scan(lambda x, w: (x @ w.T @ w, None), x, self.W)[0]
            return lax.cond(x.sum() > 0, lambda x: x @ self.W[0].T, lambda x: x[..., :3], x)

        assert {(40, 3), (3, 40)} == {*self.seen(function, X)}

    def test_rows_in_groups(self):
        """A ragged_dot follows too, in a jit or not; what sums in groups stays as it is."""
        x, w, sizes = X[0], jnp.swapaxes(self.W, 1, 2), jnp.array([1, 0, 2, 0, 1])

        def function(x):
            return jax.jit(lambda x: lax.ragged_dot(x, w, sizes))(x) @ self.W[0]

        run = functools.partial(TracedCall(recipes.mxfp8()), name="f")
        y = mx_jax.ragged_dot(x, w, sizes, recipe="mxfp8")
        assert_bitwise_equal(run(function, (x,), {}), mx_jax.matmul(y, self.W[0], recipe="mxfp8"))

        def sums_in_groups(x):
            return lax.ragged_dot_general(x, x, jnp.array([1, 2]), SUMS_IN_GROUPS)

        with pytest.raises(ValueError, match="contains no dot_general or ragged_dot"):
            run(sums_in_groups, (x,), {})

    def test_arguments_that_are_no_arrays(self):
        def function(subscripts: str, x: Any, *, scale: float):
            return scale * jnp.einsum(subscripts, x, self.W)

        args, kwargs = ("btd,fhd->btfh", np.asarray(X)), {"scale": 2.0}
        by = lambda recipe: lambda *args, key, **_: lax.dot_general(*args)  # noqa: E731
        np.testing.assert_allclose(
            TracedCall(WEIGHT_ONLY)(function, args, kwargs, name="f", dot_general=by),
            function(*args, **kwargs),
            rtol=1e-5,
        )

    def test_without_product(self):
        message = r"names the type of f, but its call contains no dot_general.* drop the type"
        run = functools.partial(TracedCall(WEIGHT_ONLY), jnp.tanh, (X,), {}, name="f")
        with pytest.raises(ValueError, match=message):
            run()
        assert run(strict=False).shape == X.shape
