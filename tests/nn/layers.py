"""What tests of linen and of nnx layers share."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx as flax_nnx

import mx_jax
from mx_jax import recipes
from mx_jax.nn import linen, nnx
from mx_jax.recipes import Recipe
from mx_jax.testing.compare import assert_bitwise_equal
from mx_jax.testing.draw import draw_few_octaves
from tests.quick import quick

HIGH, MXFP4 = recipes.high_precision(), recipes.mxfp4()


def assert_trees_equal(actual: Any, expected: Any) -> None:
    """The same tree with the same bits; the message names the leaf that differs."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(expected)]
    leaves = zip(paths, jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for path, left, right in leaves:
        assert_bitwise_equal(left, right, what=path)


def weighted_sum(y: jax.Array) -> jax.Array:
    """A loss whose gradient by y differs from place to place, in whole numbers."""
    return jnp.sum(y * (jnp.arange(y.size) % 7 - 3).reshape(y.shape))


def stochastic() -> Recipe:
    """MXFP4 that draws random bits for every operand of every product."""
    return MXFP4.with_(scale_rule="rceil", rounding="stochastic", name="stochastic")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A layer's name and arguments in both frameworks, and the product that it should be."""

    linen: tuple[Any, ...]
    nnx: tuple[Any, ...]
    product: str
    x: tuple[int, ...]
    kernel: tuple[int, ...]
    bias: tuple[int, ...]
    contracting: tuple[int, ...]  # of the kernel
    num_batch: int = 0
    options: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def drawn(self) -> np.ndarray:
        return draw_few_octaves(np.random.default_rng(0), self.x)

    def stored(self, kernel: Any, format: str) -> mx_jax.MXArray:
        return mx_jax.quantize(kernel, format, axis=self.contracting[-1])

    def multiply(self, x: Any, params: Any, recipe: Recipe) -> jax.Array:
        y = mx_jax.einsum(self.product, x, params["kernel"], recipe=recipe)
        return y + (params["bias"][:, None] if self.num_batch else params["bias"])


AXIS = {"axis": (-2, -1)}
CASES = {
    "dense": Case(
        linen=("Dense", 24),
        nnx=("Linear", 64, 24),
        product="btk,kn->btn",
        x=(3, 5, 64),
        kernel=(64, 24),
        bias=(24,),
        contracting=(0,),
    ),
    "general": Case(
        linen=("DenseGeneral", (4, 6)),
        nnx=("LinearGeneral", (2, 64), (4, 6)),
        options={"linen": AXIS, "nnx": AXIS},
        product="thk,hkmn->tmn",
        x=(3, 2, 64),
        kernel=(2, 64, 4, 6),
        bias=(4, 6),
        contracting=(0, 1),
    ),
    "batch": Case(
        linen=("DenseGeneral", 24),
        nnx=("LinearGeneral", 64, 24),
        options={"linen": {"batch_dims": (0,)}, "nnx": {"batch_axis": {0: 2}}},
        product="btk,bkn->btn",
        x=(2, 3, 64),
        kernel=(2, 64, 24),
        bias=(2, 24),
        contracting=(1,),
        num_batch=1,
    ),
    "einsum": Case(
        linen=("Einsum", (64, 4, 6), "...tk,kmn->...tmn"),
        nnx=("Einsum", "...tk,kmn->...tmn", (64, 4, 6), (4, 6)),
        product="tk,kmn->tmn",
        x=(3, 64),
        kernel=(64, 4, 6),
        bias=(4, 6),
        contracting=(0,),
    ),
}
DENSE, EINSUM = CASES["dense"], CASES["einsum"]
Runs = Callable[[Any, Any], jax.Array]


class Linen:
    """How linen's layers are made, initialized and run."""

    def build(self, case: Case, recipe: Recipe | None = None, **options: Any) -> Any:
        """With a recipe ours, without Flax's own."""
        name, *arguments = case.linen
        options |= case.options.get("linen", {})
        if recipe is None:
            return getattr(flax_nn, name)(*arguments, **options)
        return getattr(linen, name)(*arguments, recipe=recipe, **options)

    def params(self, layer: Any, x: Any) -> dict[str, Any]:
        return quick(layer.init)(jax.random.key(0), x)["params"]

    def run(self, layer: Any) -> Runs:
        return lambda params, x: layer.apply({"params": params}, x)

    def promotes(self, *args: Any, **_: Any) -> Any:
        return [None if arg is None else jnp.asarray(arg, jnp.float16) for arg in args]


class Nnx(Linen):
    """The same of nnx."""

    def build(self, case: Case, recipe: Recipe | None = None, **options: Any) -> Any:
        name, *arguments = case.nnx
        options |= {"rngs": flax_nnx.Rngs(0)} | case.options.get("nnx", {})
        if recipe is None:
            return getattr(flax_nnx, name)(*arguments, **options)
        return getattr(nnx, name)(*arguments, recipe=recipe, **options)

    def params(self, layer: Any, x: Any) -> dict[str, Any]:
        return flax_nnx.to_pure_dict(flax_nnx.state(layer))

    def run(self, layer: Any) -> Runs:
        graph, state = flax_nnx.split(layer)

        def call(params: Any, x: Any) -> jax.Array:
            model = flax_nnx.merge(graph, state, copy=True)
            for name, value in params.items():
                getattr(model, name).set_value(value)
            return model(x)

        return call

    def promotes(self, args: Any, /, **options: Any) -> Any:
        return tuple(super().promotes(*args, **options))
