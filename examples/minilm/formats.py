"""The encoder in other formats, its code untouched: rules, and weights that are quantized once."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import flax.linen as nn
import jax

from minilm.embedding import Embedder
from mx_jax import calibrate, convert, recipes


@dataclasses.dataclass(frozen=True)
class Choice:
    """The formats of a model.

    Attributes:
      weights: block format of the kernels of all dense layers.
      scale_rule: of both operands; None: the one that loses least for each format.
      activations: block format of the inputs of kernels; None: float32.
      words: block format of the table of words; None: float32.
    """

    weights: str
    scale_rule: str | None = None
    activations: str | None = None
    words: str | None = None

    def rules(self) -> list[convert.Rule]:
        """For `convert`.

        Raises:
          ValueError: unknown names, or ones that do not go together.
        """
        recipe = recipes.weight_only(self.weights, self.scale_rule)
        if self.activations is not None:
            parts = {"format": self.activations}
            if self.scale_rule is not None:
                parts["scale_rule"] = self.scale_rule
            recipe = recipe.with_(activations=parts)
        rules = [convert.Rule(".*", recipe)]
        if self.words is not None:
            table = recipes.weight_only(self.words, self.scale_rule)
            rules.append(convert.Rule("words", table, types=nn.Embed))
        return rules


def quantized(
    model: nn.Module, variables: Any, choice: Choice, by: calibrate.Way | None = None
) -> Embedder:
    """The same model with stored, quantized weights.

    Args:
      model: in float32.
      variables: its own.
      choice: of formats.
      by: the way to choose codes (`mx_jax.calibrate`); None: a plain cast.
    """
    return Embedder(converted(model, choice), stored(variables, choice, by))


def converted(model: nn.Module, choice: Choice) -> nn.Module:
    """The model, multiplying as chosen; it takes float32 parameters or stored ones.

    The two products of each attention stay in high precision.
    """
    return convert.linen(model, [convert.Rule(".*->.*", None), *choice.rules()])


def stored(variables: Any, choice: Choice, by: calibrate.Way | None = None) -> Any:
    """Parameters with the chosen ones quantized; activations do not matter to them."""
    return convert.weights(variables, choice.rules(), by=by)


def moments(model: nn.Module, variables: Any, batches: Iterable[Any]) -> calibrate.Moments:
    """Moments of the inputs of each dense layer, for GPTQ, over batches of `embedding`."""
    pairs = ((batch.tokens, batch.mask) for batch in batches)
    return calibrate.moments(model, pairs, variables=variables)


def kernel_bytes(variables: Any) -> int:
    """Bytes of the kernels, as they lie in memory: packed where the machine's kernels want it."""
    return _bytes(variables, "kernel")


def table_bytes(variables: Any) -> int:
    """Bytes of the tables that tokens are looked up in."""
    return _bytes(variables, "embedding")


def _bytes(variables: Any, name: str) -> int:
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    return sum(leaf.nbytes for path, leaf in leaves if f"'{name}'" in jax.tree_util.keystr(path))
