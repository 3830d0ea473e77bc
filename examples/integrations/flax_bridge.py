"""Quantized layers across Flax's bridge, both ways: `python flax_bridge.py`.

A linen layer with `DotGeneral` inside an nnx model (`nnx.bridge.ToNNX`), and an nnx layer with a
recipe inside a linen model (`nnx.bridge.ToLinen`). Both draw from the stream "quantize".
"""

import flax.linen as nn
import jax
from flax import nnx
from shared import CLASSES, FEATURES, Report, run_command, show, train_linen, train_nnx

import mx_jax
from mx_jax.nn.linen import DotGeneral

RECIPE = "mxfp4_stochastic"


class NnxModel(nnx.Module):
    """A linen layer inside nnx, which gets a first input when it is made."""

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


def main(steps: int = 20) -> dict[str, tuple[list[float], Report]]:
    print("\nlinen in nnx")
    results = {"linen in nnx": train_nnx(NnxModel(nnx.Rngs(0, quantize=1)), steps)}
    print("\nnnx in linen")
    results["nnx in linen"] = train_linen(LinenModel(), steps)
    show(f"{name}\n{layers}\n" for name, (_, layers) in results.items())
    return results


if __name__ == "__main__":
    run_command(main, __doc__)
