"""Delayed float8 scaling for flax.linen layers, with the state of Flax's own float8 layers."""

from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from mx_jax.formats import E4M3, E5M2, ElementFormat
from mx_jax.ops.delayed import DelayedState, DelayedStates, Elements, delayed_dot_general


class DelayedDotGeneral(flax_nn.Module):
    """A `dot_general_cls` for linen layers: float8 products whose scales come from earlier steps.

    State lives in Flax's `_overwrite_with_gradient` collection under the names of Flax's own float8
    layers, so `flax.training.train_state.TrainState` updates it: differentiate with respect to all
    variables, and its "gradient" is its next value.

    Attributes:
      history_length: steps whose largest amax sets the scale.
      forward_element: format of inputs and weights.
      gradient_element: format of incoming gradients.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, mx_jax
      >>> layer = nn.Dense(8, dot_general_cls=mx_jax.nn.linen.DelayedDotGeneral)
      >>> variables = jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((2, 64)))
      >>> sorted(variables)
      ['_overwrite_with_gradient', 'params']
    """

    history_length: int = 1024
    forward_element: ElementFormat = E4M3
    gradient_element: ElementFormat = E5M2

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
        states = DelayedStates(
            *(self._scale_state(name) for name in ("input", "kernel", "output_grad"))
        )
        out_dtype = preferred_element_type or jnp.result_type(lhs, rhs)
        elements = Elements(self.forward_element, self.forward_element, self.gradient_element)
        return delayed_dot_general(lhs, rhs, dimension_numbers, states, elements, out_dtype)

    def _scale_state(self, name: str) -> DelayedState:
        scale = self.variable(OVERWRITE_WITH_GRADIENT, f"{name}_scale", jnp.ones, (1,))
        history = self.variable(
            OVERWRITE_WITH_GRADIENT, f"{name}_amax_history", jnp.zeros, (self.history_length,)
        )
        return DelayedState(scale.value, history.value)
