"""The same small models from Flax's layers and, written by hand, from layers with a recipe.

`layers` is `FLAX`, whose layers know nothing of recipes, or `by_hand(recipe)`. Both make the same
parameters. Sizes are no multiples of 32 on purpose, except where a test says so.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

import mx_jax
from mx_jax.recipes import Recipe

WIDTH = 48


@dataclasses.dataclass(frozen=True)
class Layers:
    """Constructors of the four kinds of layers; frozen, so that models compare by value."""

    Dense: Callable[..., Any]
    DenseGeneral: Callable[..., Any]
    Einsum: Callable[..., Any]
    Attention: Callable[..., Any]


FLAX = Layers(nn.Dense, nn.DenseGeneral, nn.Einsum, nn.MultiHeadDotProductAttention)


def by_hand(recipe: Recipe) -> Layers:
    def einsum():
        return functools.partial(mx_jax.einsum, recipe=recipe)

    return Layers(
        functools.partial(mx_jax.nn.linen.Dense, recipe=recipe),
        functools.partial(mx_jax.nn.linen.DenseGeneral, recipe=recipe),
        functools.partial(mx_jax.nn.linen.Einsum, recipe=recipe),
        functools.partial(
            nn.MultiHeadDotProductAttention,
            qkv_dot_general=recipe.dot_general,
            out_dot_general=recipe.dot_general,
            qk_attn_weights_einsum_cls=einsum,
            attn_weights_value_einsum_cls=einsum,
        ),
    )


class Block(nn.Module):
    layers: Layers

    @nn.compact
    def __call__(self, x):
        return x + self.layers.Dense(WIDTH)(nn.tanh(x))


class Compact(nn.Module):
    """Every kind of layer, made where it is used."""

    layers: Layers

    @nn.compact
    def __call__(self, x):
        x = x + self.layers.Attention(num_heads=2, name="attention")(x)
        heads = self.layers.DenseGeneral((2, 5), name="split")(x)
        heads = self.layers.Einsum((2, 5, 7), "bthk,hkf->bthf", name="each_head")(heads)
        x = self.layers.DenseGeneral(WIDTH, axis=(-2, -1), name="merge")(heads)
        return self.layers.Dense(11, name="head")(x)


class Setup(nn.Module):
    """Layers made in setup, in a list and a dict; one of them is used twice."""

    layers: Layers

    def setup(self):
        self.shared = self.layers.Dense(WIDTH)
        self.blocks = [Block(self.layers), Block(self.layers)]
        self.heads = {"left": self.layers.Dense(3), "right": self.layers.Dense(4)}

    def __call__(self, x):
        x = self.shared(x)
        for block in self.blocks:
            x = block(x)
        x = self.shared(x)
        return jnp.concatenate([self.heads["left"](x), self.heads["right"](x)], -1)


def scanned(layers: Layers) -> nn.Module:
    class Scanned(nn.Module):
        layers: Layers

        @nn.compact
        def __call__(self, x):
            stack = nn.scan(
                lambda block, x, _: (block(x), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=2,
            )
            return stack(nn.remat(Block)(self.layers, name="blocks"), x, None)[0]

    return Scanned(layers)


class Ensemble(nn.Module):
    """nn.vmap: one parameter set for each member."""

    layers: Layers

    @nn.compact
    def __call__(self, x):
        members = nn.vmap(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=None,
            axis_size=2,
        )
        return members(self.layers, name="members")(x)


class RematMethod(nn.Module):
    """nn.remat on a method, and a submodule that was passed in as an attribute."""

    layers: Layers
    block: nn.Module

    @nn.remat
    @nn.compact
    def __call__(self, x):
        return self.layers.Dense(5)(self.block(x))


class Recurrent(nn.Module):
    """A cell that scans itself over time."""

    layers: Layers

    @nn.compact
    def __call__(self, x):
        class Cell(nn.Module):
            layers: Layers

            @nn.compact
            def __call__(self, carry, x):
                carry = nn.tanh(
                    self.layers.Dense(6, name="i")(x) + self.layers.Dense(6, name="h")(carry)
                )
                return carry, carry

        cell = nn.scan(
            Cell, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1
        )
        return cell(self.layers, name="cell")(jnp.zeros((x.shape[0], 6)), x)[1]


class Jitted(nn.Module):
    """nn.jit, twice with one class: Flax compiles it once for both."""

    layers: Layers

    @nn.compact
    def __call__(self, x):
        block = nn.jit(Block)
        return block(self.layers, name="second")(block(self.layers, name="first")(x))


# name -> model from layers, number of layers (and products) that a rule can reach
MODELS: dict[str, tuple[Callable[[Layers], nn.Module], int]] = {
    "compact": (Compact, 10),
    "setup": (Setup, 5),
    "scan of remat": (scanned, 1),
    "vmap": (Ensemble, 1),
    "remat method, module as attribute": (lambda layers: RematMethod(layers, Block(layers)), 2),
    "recurrent": (Recurrent, 2),
    "jit": (Jitted, 2),
    "lifted class": (lambda layers: nn.remat(Block)(layers), 1),
}


def example_input() -> np.ndarray:
    return np.random.default_rng(7).standard_normal((2, 3, WIDTH), np.float32)
