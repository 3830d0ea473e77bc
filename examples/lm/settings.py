"""The settings of an experiment, and the precisions it compares."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax.numpy as jnp

import mx_jax.recipes


# Functions: float8's recipes ask JAX for its platform, and the program may still have to make its
# devices.
@cache
def known_recipes() -> tuple[str, ...]:
    """Every named recipe under one name: here, high_precision is called by its dtype."""
    named = (name for name in mx_jax.recipes.names() if name != "high_precision")
    return (
        "float32",
        "bf16",
        *dict.fromkeys(mx_jax.recipes.from_name(name).name for name in named),
    )


@cache
def aliases() -> dict[str, str]:
    """Other names of the library for the same recipes."""
    return {
        name: mx_jax.recipes.from_name(name).name
        for name in mx_jax.recipes.names()
        if name not in known_recipes() and name != "high_precision"
    } | {"high_precision": "float32"}


def _setting(text: str, **default: Any) -> Any:
    return field(metadata={"help": text}, **default)


# Ways to store an optimizer's states: functions of the optimizer.
STATES: dict[str, Callable[[Any], Any]] = {
    "float32": lambda optimizer: optimizer,
    "mxfp8": mx_jax.quantize_state,
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every number that changes a result; two runs with equal settings are equal bit by bit."""

    d_model: int = _setting("width of the residual stream")
    layers: int = _setting("transformer blocks")
    heads: int = _setting("attention heads")
    context: int = _setting("characters in a sequence")
    batch: int = _setting("sequences per step")
    steps: int = _setting("optimizer steps")
    lr: float = _setting("peak learning rate: warm-up for 1/8 of the steps, then cosine decay")
    weight_decay: float = _setting("AdamW's weight decay of matrices")
    grad_clip: float = _setting("largest global norm of the gradients")
    eval_every: int = _setting("steps between validations")
    eval_tokens: int = _setting("characters read in each validation")
    states: str = _setting(
        "optimizer states: float32, or mxfp8 by mx_jax.quantize_state", default="float32"
    )
    heal: float = _setting("last part of the steps in high precision, as 0.1", default=0.0)

    def __post_init__(self) -> None:
        if self.states not in STATES:
            raise ValueError(f"states must be one of {', '.join(STATES)}, got states={self.states}")
        for name, value in vars(self).items():
            if name == "states":
                continue
            if not value > 0 and not (name in ("weight_decay", "heal") and value == 0):
                raise ValueError(f"{name} must be positive, got {name}={value}")
        if self.heal > 1:
            raise ValueError(f"heal is a part of the steps, as 0.1, got heal={self.heal}")
        if self.d_model % (2 * self.heads):
            raise ValueError(
                "d_model must be a multiple of 2 * heads (rotary positions turn pairs), "
                f"got d_model={self.d_model}, heads={self.heads}"
            )

    @property
    def warmup(self) -> int:
        """Steps until the learning rate peaks."""
        return self.steps // 8

    @property
    def late_steps(self) -> int:
        """Steps at the end over which losses and parameters are averaged: a quarter."""
        return max(1, self.steps // 4)

    @property
    def tokens_per_step(self) -> int:
        """Characters an optimizer step learns from."""
        return self.batch * self.context


HIGH_PRECISION = mx_jax.recipes.high_precision()


@dataclass(frozen=True, kw_only=True)
class Precision:
    """How the linear layers multiply, and the dtype of everything around them.

    Attributes:
      recipe: of the linear layers inside the blocks.
      dtype: of everything that no recipe casts.
      head: recipe of the output layer.
      high_blocks: indices of the blocks whose linear layers stay in high precision; negative ones
        count from the last.
    """

    recipe: mx_jax.recipes.Recipe
    dtype: Any = jnp.float32
    head: mx_jax.recipes.Recipe = HIGH_PRECISION
    high_blocks: tuple[int, ...] = ()


# A suffix of a recipe's name: the first and the last block stay in high precision.
ENDS = "+ends"


def precision(name: str) -> Precision:
    """The precision behind a name of `known_recipes()`, or of one and `ENDS`.

    Quantized recipes keep float32 around them, so that their gap to float32 is the
    quantization's alone.
    """
    if name.endswith(ENDS):
        return dataclasses.replace(precision(name.removesuffix(ENDS)), high_blocks=(0, -1))
    if name == "bf16":
        return Precision(recipe=HIGH_PRECISION, dtype=jnp.bfloat16)
    if name == "float32":
        return Precision(recipe=HIGH_PRECISION)
    return Precision(recipe=mx_jax.recipes.from_name(name))
