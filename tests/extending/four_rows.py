"""A backend of one kind of call: casts of four rows, behind a barrier that tells them apart."""

import jax

from mx_jax.backends.calls import QuantizeCall
from mx_jax.backends.reference import REFERENCE
from mx_jax.backends.target import Backend, Offer, Target
from mx_jax.mxarray import MXArray


def needs_four_rows(call: QuantizeCall, target: Target) -> str | None:
    """Why a cast is not taken, or None."""
    return None if call.shape[0] == 4 else f"needs 4 rows, got shape={call.shape}"


def behind_a_barrier(
    x: jax.Array, random_bits: jax.Array | None, tensor_scale: jax.Array | None, call: QuantizeCall
) -> MXArray:
    """The reference's cast of what a barrier lets through."""
    return REFERENCE.run(call, jax.lax.optimization_barrier(x), random_bits, tensor_scale)


FOUR_ROWS = Backend(
    name="four_rows",
    epsilon_bound=2.0,
    table=(Offer(call=QuantizeCall, rejects=needs_four_rows, run=behind_a_barrier),),
)
