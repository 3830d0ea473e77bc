"""haliax's own layers, which levanter's models are made of: `python haliax_linear.py`.

Needs `pip install --pre haliax` (1.4.dev453). A `DotGeneralOp` with a recipe is a pytree without
leaves, so that a model with it can go through jit, grad and scan.
"""

import dataclasses
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import optax
from shared import (
    CLASSES,
    FEATURES,
    TOKENS,
    Report,
    cross_entropy,
    data,
    report,
    run_command,
    show,
    train,
)

import mx_jax

Batch, Token, Embed, Mlp, Class, Block = hax.make_axes(
    batch=64, token=TOKENS, embed=FEATURES, mlp=FEATURES, classes=CLASSES, block=2
)


# --8<-- [start:lines]
class MxDotGeneral(eqx.Module):
    """A recipe as levanter's optimizers want a `DotGeneralOp`: a module of Equinox."""

    recipe: mx_jax.recipes.Recipe = eqx.field(static=True)

    def __call__(self, *args: Any, **options: Any) -> jax.Array:
        return self.recipe.dot_general(*args, **options)


def quantized(model: Any, recipe: mx_jax.recipes.Recipe, keep: tuple[str, ...] = ()) -> Any:
    """The model with a recipe in each Linear, but for those with a name in keep; stacks too."""

    def replace(path: Any, leaf: Any) -> Any:
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        if not isinstance(leaf, hnn.Linear) or set(names) & set(keep):
            return leaf
        return dataclasses.replace(leaf, dot_general=MxDotGeneral(recipe))

    return jax.tree_util.tree_map_with_path(
        replace, model, is_leaf=lambda leaf: isinstance(leaf, hnn.Linear)
    )


# --8<-- [end:lines]


class Layer(eqx.Module):
    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(*, key: Any) -> "Layer":
        first, second = jax.random.split(key)
        return Layer(
            hnn.Linear.init(Embed, Mlp, key=first), hnn.Linear.init(Mlp, Embed, key=second)
        )

    def __call__(self, x: Any) -> Any:
        with jax.named_scope("up"):
            up = hnn.gelu(self.up(x))
        with jax.named_scope("down"):
            return x + self.down(up)


class Model(eqx.Module):
    layers: hnn.Stacked
    head: hnn.Linear

    @staticmethod
    def init(key: Any) -> "Model":
        first, second = jax.random.split(key)
        layers = hnn.Stacked.init(Block, Layer)(key=jax.random.split(first, Block.size))
        return Model(layers, hnn.Linear.init(Embed, Class, key=second))

    def __call__(self, x: Any) -> Any:
        x = hax.mean(self.layers.fold(x), Token)
        with jax.named_scope("head"):
            return self.head(x)


def main(steps: int = 20) -> tuple[list[float], Report]:
    values, labels = data(Batch.size)
    x = hax.named(values, (Batch, Token, Embed))
    model = quantized(Model.init(jax.random.PRNGKey(0)), mx_jax.recipes.mxfp8(), keep=("head",))
    optimizer = optax.adam(3e-3)

    def mean_loss(model: Model) -> jax.Array:
        return cross_entropy(model(x).array, labels)

    @jax.jit
    def step(state: Any, number: Any) -> Any:
        model, memory = state
        loss, gradients = jax.value_and_grad(mean_loss)(model)
        updates, memory = optimizer.update(gradients, memory)
        return (optax.apply_updates(model, updates), memory), loss

    state = (model, optimizer.init(model))
    compiled = step.lower(state, 0).compile()
    losses, layers = train(compiled, state, steps), report(compiled.as_text())
    show([layers])
    return losses, layers


if __name__ == "__main__":
    run_command(main, __doc__)
