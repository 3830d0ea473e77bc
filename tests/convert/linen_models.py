"""Small models of Flax's layers, in everything that may contain them.

Sizes are no multiples of 32 on purpose, except where a test says so.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

WIDTH = 48


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(WIDTH)(nn.tanh(x))


class Compact(nn.Module):
    """Every kind of layer, made where it is used."""

    attention_fn: Any = nn.dot_product_attention

    @nn.compact
    def __call__(self, x):
        attention = nn.MultiHeadDotProductAttention(
            num_heads=2, attention_fn=self.attention_fn, name="attention"
        )
        heads = nn.DenseGeneral((2, 5), name="split")(x + attention(x))
        heads = nn.Einsum((2, 5, 7), "bthk,hkf->bthf", name="each_head")(heads)
        x = nn.DenseGeneral(WIDTH, axis=(-2, -1), name="merge")(heads)
        return nn.Dense(11, name="head")(x)


class Setup(nn.Module):
    """Layers made in setup, in a list and a dict; one of them is used twice."""

    def setup(self):
        self.shared = nn.Dense(WIDTH)
        self.blocks = [Block(), Block()]
        self.heads = {"left": nn.Dense(3), "right": nn.Dense(4)}

    def __call__(self, x):
        x = self.shared(x)
        for block in self.blocks:
            x = block(x)
        x = self.shared(x)
        return jnp.concatenate([self.heads["left"](x), self.heads["right"](x)], -1)


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        stack = nn.scan(
            lambda block, x, _: (block(x), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
        )
        return stack(nn.remat(Block)(name="blocks"), x, None)[0]


class Ensemble(nn.Module):
    """nn.vmap: one parameter set for each member."""

    @nn.compact
    def __call__(self, x):
        members = nn.vmap(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=None,
            axis_size=2,
        )
        return members(name="members")(x)


class RematMethod(nn.Module):
    """nn.remat on a method, and a submodule that was passed in as an attribute."""

    block: nn.Module

    @nn.remat
    @nn.compact
    def __call__(self, x):
        return nn.Dense(5)(self.block(x))


class Repeated(nn.Module):
    """One class twice, which nn.jit compiles once for both."""

    @nn.compact
    def __call__(self, x):
        block = nn.jit(Block)
        return block(name="second")(block(name="first")(x))


# name -> model from layers, number of layers (and products) that a rule can reach
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "compact": (Compact, 10),
    "setup": (Setup, 5),
    "scan of remat": (Scanned, 1),
    "vmap": (Ensemble, 1),
    "remat method, module as attribute": (lambda: RematMethod(Block()), 2),
    "lifted class": (lambda: nn.remat(Block)(), 1),
}


def example_input() -> np.ndarray:
    return np.random.default_rng(7).standard_normal((2, 3, WIDTH), np.float32)
