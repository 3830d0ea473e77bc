"""Quantized layers across Flax's bridge, both ways: `python flax_bridge.py`.

A linen layer with `DotGeneral` inside an nnx model (`nnx.bridge.ToNNX`), and an nnx layer with a
recipe inside a linen model (`nnx.bridge.ToLinen`). Both draw from the stream "quantize".
"""

from typing import Any

import flax.linen as nn
import jax
import optax
from flax import nnx
from shared import CLASSES, FEATURES, Report, cross_entropy, data, report, show, train

import mx_jax
from mx_jax.nn.linen import DotGeneral

RECIPE = "mxfp4_stochastic"


class NnxModel(nnx.Module):
    """A linen layer inside nnx. It is given a first input when it is made."""

    def __init__(self, rngs: nnx.Rngs):
        layer = nn.Dense(FEATURES, dot_general_cls=DotGeneral(RECIPE), name="hidden")
        self.hidden = nnx.bridge.ToNNX(layer, rngs=rngs).lazy_init(jax.numpy.ones((1, FEATURES)))
        self.head = nnx.Linear(FEATURES, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(nnx.relu(self.hidden(x)).mean(axis=1))


class LinenModel(nn.Module):
    """An nnx layer inside linen. Without `rngs={"quantize": key}` each step would round alike."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = nnx.bridge.ToLinen(
            mx_jax.nn.nnx.Linear,
            args=(FEATURES, FEATURES),
            kwargs={"recipe": mx_jax.recipes.from_name(RECIPE)},
            name="hidden",
        )
        return nn.Dense(CLASSES, name="head")(nn.relu(hidden(x)).mean(axis=1))


def in_nnx(steps: int) -> tuple[list[float], Report]:
    x, labels = data()
    model = NnxModel(nnx.Rngs(0, quantize=1))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: NnxModel, optimizer: nnx.Optimizer) -> jax.Array:
        loss, gradients = nnx.value_and_grad(lambda m: cross_entropy(m(x), labels))(model)
        optimizer.update(model, gradients)
        return loss

    compiled = step.lower(model, optimizer).compile()
    losses = train(lambda state, _: (state, compiled(*state)), (model, optimizer), steps)
    return losses, report(compiled.as_text())


def in_linen(steps: int) -> tuple[list[float], Report]:
    x, labels = data()
    model, optimizer = LinenModel(), optax.adam(3e-3)
    params = model.init(jax.random.key(0), x)["params"]

    def mean_loss(params: Any, key: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": params}, x, rngs={"quantize": key})
        return cross_entropy(logits, labels)

    @jax.jit
    def step(state: Any, number: jax.typing.ArrayLike) -> Any:
        params, memory = state
        key = jax.random.fold_in(jax.random.key(1), number)
        loss, gradients = jax.value_and_grad(mean_loss)(params, key)
        updates, memory = optimizer.update(gradients, memory)
        return (optax.apply_updates(params, updates), memory), loss

    state = (params, optimizer.init(params))
    compiled = step.lower(state, 0).compile()
    return train(compiled, state, steps), report(compiled.as_text())


def main(steps: int = 20) -> dict[str, tuple[list[float], Report]]:
    results = {}
    for name, run in (("linen in nnx", in_nnx), ("nnx in linen", in_linen)):
        print(f"\n{name}")
        results[name] = run(steps)
        show([results[name][1]])
    return results


if __name__ == "__main__":
    main()
