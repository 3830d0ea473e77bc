"""Delayed float8 scaling for flax.linen layers, with the state of Flax's own float8 layers."""

from typing import Any, Literal

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
from flax.core.tracers import current_trace
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from mx_jax.formats import E4M3, E5M2, ElementFormat
from mx_jax.ops.delayed import (
    DelayedState,
    DelayedStates,
    Elements,
    Scaling,
    chained_dot_general,
)

# Where a scope keeps the states of its products for their next use in the same trace.
_CHAINS = "_mx_jax_delayed"


class DelayedDotGeneral(flax_nn.Module):
    """A `dot_general_cls` for linen layers: float8 products whose scales come from earlier steps.

    State lives in Flax's `_overwrite_with_gradient` collection under the names of Flax's own float8
    layers, so `flax.training.train_state.TrainState` updates it: differentiate with respect to all
    variables, and its "gradient" is its next value. A layer called several times in a step gets the
    largest amaxes of its calls. Below shard_map they are those of all shards.

    The scale is `2^margin * amax / element max`, a value `code * scale`: TransformerEngine's
    `DelayedScaling`, whose scale is the reciprocal. What TransformerEngine chooses is chosen under
    its names.

    Attributes:
      history_length: steps whose amaxes are kept.
      margin: powers of two left between the largest value and the format's.
      amax_compute_algo: which amax of the history counts, `"max"` or `"most_recent"`.
      forward_element: format of inputs and weights.
      gradient_element: format of incoming gradients.

    Examples:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, mx_jax
      >>> layer = nn.Dense(8, dot_general_cls=mx_jax.nn.linen.DelayedDotGeneral)
      >>> variables = jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((2, 64)))
      >>> sorted(variables)
      ['_overwrite_with_gradient', 'params']
    """

    history_length: int = 1024
    margin: int = 0
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    forward_element: ElementFormat = E4M3
    gradient_element: ElementFormat = E5M2

    def __post_init__(self):
        if self.history_length < 1:
            raise ValueError(
                "DelayedDotGeneral: history_length must be at least 1, got "
                f"history_length={self.history_length}"
            )
        if isinstance(self.margin, bool) or not isinstance(self.margin, int):
            raise TypeError(
                "DelayedDotGeneral: margin must be an int, a power of two, got "
                f"margin={self.margin!r}"
            )
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(
                "DelayedDotGeneral: amax_compute_algo must be 'max' or 'most_recent', got "
                f"amax_compute_algo={self.amax_compute_algo!r}"
            )
        super().__post_init__()

    @flax_nn.compact
    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        **options: Any,
    ) -> jax.Array:
        """The product; see `jax.lax.dot_general`."""
        out_dtype = preferred_element_type or jnp.result_type(lhs, rhs)
        elements = Elements(self.forward_element, self.forward_element, self.gradient_element)
        scaling = Scaling(self.margin, self.amax_compute_algo == "most_recent")
        states = DelayedStates(
            *(self._scale_state(name) for name in ("input", "kernel", "output_grad"))
        )
        chain = self._chain(states)
        product, chain[-1] = chained_dot_general(
            lhs, rhs, dimension_numbers, chain[-1], elements, out_dtype, scaling
        )
        return product

    def _chain(self, states: DelayedStates) -> list[DelayedStates]:
        """States as the variables hold them, then as the module's latest product left them.

        The second only within one trace: what another trace made must not be used.
        """
        assert self.scope is not None
        chains = vars(self.scope.root).setdefault(_CHAINS, {})
        trace = current_trace()
        made_in, chain = chains.get(self.path, (None, [states]))
        leaves = zip(jax.tree.leaves(chain[0]), jax.tree.leaves(states), strict=True)
        if made_in != trace or any(old is not new for old, new in leaves):
            chain = [states, states]
            chains[self.path] = (trace, chain)
        return chain

    def _scale_state(self, name: str) -> DelayedState:
        scale = self.variable(OVERWRITE_WITH_GRADIENT, f"{name}_scale", jnp.ones, (1,))
        history = self.variable(
            OVERWRITE_WITH_GRADIENT, f"{name}_amax_history", jnp.zeros, (self.history_length,)
        )
        return DelayedState(scale.value, history.value)
