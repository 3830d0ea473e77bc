"""Which measurements a program's kernels were chosen by."""

from collections.abc import Callable
from typing import Any

import jax

from mx_jax.backends.evidence import Row, in_force
from mx_jax.backends.select import recording
from mx_jax.inspect.abstract import of_arrays


def evidence_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Row, ...]:
    """The measured rows by which kernels take parts of a call: what to record beside its results.

    The function is traced as `jit` would, without computing; where no row counts, not even that.
    Another program, or the same one where other rows count, may round otherwise. A file of the
    rows, which `mx_jax.backends.evidence.write` makes, gives the same choices back:
    `MX_JAX_EVIDENCE` names it.

    Args:
      function: what is called, of any kind: a model's `apply`, a train step.
      *args: its arguments; arrays may be `jax.ShapeDtypeStruct`.
      **kwargs: likewise.

    Returns:
      Each row once, in the order of use; none where no kernel was asked for a measurement's sake.

    Raises:
      ValueError: whatever the call itself raises.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> mx_jax.inspect.evidence_of(mx_jax.quantize, jnp.ones((8, 64)), "mxfp4")
      ()
    """
    if not in_force():
        return ()
    with recording() as recorder:
        jax.eval_shape(*of_arrays(function, *args, **kwargs))
    rows = (selection.evidence for selection in recorder.selections)
    return tuple(dict.fromkeys(row for row in rows if row is not None))
