"""Flax linen's own layers in four bits, by their own arguments: `python linen_hooks.py`.

Recipes with stochastic rounding too: `DotGeneral` and `EinsumOp` draw from the stream "quantize".
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import optax
from shared import CLASSES, FEATURES, Report, cross_entropy, data, report, show, train

from mx_jax.nn.linen import DotGeneral, EinsumOp

RECIPE = "mxfp4_stochastic"


class Model(nn.Module):
    """An attention, a layer after it, and a head in float32."""

    recipe: Any = RECIPE

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        product = DotGeneral(self.recipe)
        attention = nn.MultiHeadDotProductAttention(
            num_heads=2,
            qkv_dot_general_cls=product,
            out_dot_general_cls=product,
            qk_attn_weights_einsum_cls=EinsumOp("mxfp8"),
            attn_weights_value_einsum_cls=EinsumOp("mxfp8"),
            name="attention",
        )
        x = x + attention(nn.LayerNorm()(x))
        x = x + nn.gelu(nn.Dense(FEATURES, dot_general_cls=product, name="mlp")(x))
        return nn.Dense(CLASSES, name="head")(x.mean(axis=1))


def main(steps: int = 20) -> tuple[list[float], Report]:
    x, labels = data()
    model, optimizer = Model(), optax.adam(3e-3)
    params = jax.jit(model.init)(jax.random.key(0), x)["params"]

    def mean_loss(params: Any, key: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": params}, x, rngs={"quantize": key})
        return cross_entropy(logits, labels)

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, number: jax.typing.ArrayLike) -> Any:
        params, memory = state
        key = jax.random.fold_in(jax.random.key(1), number)
        loss, gradients = jax.value_and_grad(mean_loss)(params, key)
        updates, memory = optimizer.update(gradients, memory)
        return (optax.apply_updates(params, updates), memory), loss

    state = (params, optimizer.init(params))
    compiled = step.lower(state, 0).compile()
    losses, found = train(compiled, state, steps), report(compiled.as_text())
    show([found])
    return losses, found


if __name__ == "__main__":
    main()
