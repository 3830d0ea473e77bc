"""A `Quantization` of MaxText that follows a recipe: `python maxtext_quantization.py`.

Needs MaxText (0.2.5). Its layers ask a `Quantization` for a linen module to multiply with and
carry that into nnx themselves.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
from typing import Any
from unittest import mock

os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")

import jax
import optax
from flax import nnx
from maxtext.kernels import megablox
from maxtext.layers import linears, quantizations
from shared import CLASSES, FEATURES, Report, cross_entropy, data, report, run_command, show, train

import mx_jax
from mx_jax.nn.linen import DotGeneral, EinsumOp


# --8<-- [start:lines]
@dataclasses.dataclass(unsafe_hash=True)
class MxQuantization(quantizations.Quantization):
    """Dense layers and einsums by a recipe."""

    recipe: mx_jax.recipes.Recipe

    quant_mode = "train"

    @property
    def needs_apply_rngs(self):
        return self.recipe.is_stochastic

    def dot_general_cls(self, mesh_axes=()):
        return functools.partial(DotGeneral, self.recipe, stream="params")

    def einsum(self, mesh_axes=(), dtype=None):
        return EinsumOp(self.recipe, stream="params")

    def get_block_size(self):
        return 1  # the last block of an axis may be partial


def use_recipe(name):
    """Makes MaxText build its layers by a named recipe, whatever `quantization` says."""
    made = MxQuantization(mx_jax.recipes.from_name(name))
    quantizations.configure_quantization = lambda config, quant_mode_str="train": made


@contextlib.contextmanager
def ragged_products(recipe, key=None):
    """Sparse layers by a recipe: what is traced inside calls mx_jax.ragged_dot.

    They call `jax.lax.ragged_dot` or megablox by name. With stochastic rounding each product that
    is traced has a key of its own; layers of one scan share it.
    """
    count, plain = itertools.count(), jax.lax.ragged_dot

    def ragged_dot(lhs, rhs, group_sizes, precision=None, preferred_element_type=None, **others):
        refused = {name: value for name, value in others.items() if value is not None}
        if refused:
            raise ValueError(f"ragged_products: mx_jax.ragged_dot has no {', '.join(refused)}")
        product_key = jax.random.fold_in(key, next(count)) if key is not None else None
        with mock.patch("jax.lax.ragged_dot", plain):
            return mx_jax.ragged_dot(
                lhs,
                rhs,
                group_sizes,
                recipe=recipe,
                precision=precision,
                preferred_element_type=preferred_element_type,
                key=product_key,
            )

    def gmm(lhs, rhs, group_sizes, preferred_element_type=None, **options):
        if options.get("transpose_rhs") or options.get("partial_sum") is not None:
            raise ValueError("ragged_products: transpose_rhs and partial_sum are not offered")
        return ragged_dot(
            lhs,
            rhs,
            group_sizes,
            preferred_element_type=preferred_element_type,
            group_offset=options.get("group_offset"),
        )

    with mock.patch("jax.lax.ragged_dot", ragged_dot), mock.patch.object(megablox, "gmm", gmm):
        yield


# --8<-- [end:lines]


class Model(nnx.Module):
    """Two dense layers of MaxText's, experts as its sparse layers multiply them, and a head."""

    def __init__(self, quant: Any, rngs: nnx.Rngs):
        dense = functools.partial(linears.DenseGeneral, rngs=rngs)
        axes = ("embed", "mlp")
        self.up = dense(FEATURES, 2 * FEATURES, quant=quant, kernel_axes=axes)
        self.down = dense(2 * FEATURES, FEATURES, quant=quant, kernel_axes=axes[::-1])
        init = nnx.initializers.lecun_normal()
        self.experts = nnx.Param(init(rngs.params(), (2, FEATURES, FEATURES)))
        self.head = dense(FEATURES, CLASSES)

    def __call__(self, x: jax.Array) -> jax.Array:
        with jax.named_scope("up"):
            up = nnx.gelu(self.up(x))
        with jax.named_scope("down"):
            x = (x + self.down(up)).mean(axis=1)
        sizes = jax.numpy.full(2, x.shape[0] // 2)
        with jax.named_scope("experts"):
            x = x + jax.lax.ragged_dot(lhs=x, rhs=self.experts[...], group_sizes=sizes)
        with jax.named_scope("head"):
            return self.head(x)


def main(steps: int = 20, recipe: str = "mxfp4_stochastic") -> tuple[list[float], Report]:
    x, labels = data()
    use_recipe(recipe)
    quant = quantizations.configure_quantization(None)
    model = Model(quant, nnx.Rngs(params=0, dropout=1))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: Model, optimizer: nnx.Optimizer, number: Any) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(1), number)
        with ragged_products(quant.recipe, key):
            loss, gradients = nnx.value_and_grad(lambda m: cross_entropy(m(x), labels))(model)
        optimizer.update(model, gradients)
        return loss

    compiled = step.lower(model, optimizer, 0).compile()
    losses = train(
        lambda state, number: (state, compiled(*state, number)), (model, optimizer), steps
    )
    layers = report(compiled.as_text())
    show([layers])
    return losses, layers


if __name__ == "__main__":
    run_command(main, __doc__)
