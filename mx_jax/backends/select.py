"""Which backend takes a call: a pure function, so the whole table is testable on any machine."""

import contextlib
import dataclasses
from typing import Any

import jax

from mx_jax.backends.calls import NOT_OFFERED, Call
from mx_jax.backends.cpu_ffi import CPU_FFI
from mx_jax.backends.measured import Row, row_about
from mx_jax.backends.pallas_gpu import PALLAS_GPU
from mx_jax.backends.pallas_tpu import PALLAS_TPU
from mx_jax.backends.reference import REFERENCE
from mx_jax.backends.target import Backend, Offer, Target, current_target, only_named
from mx_jax.backends.xla import XLA, XLA_BFLOAT16, XLA_ROUNDED
from mx_jax.backends.xla_scaled import XLA_SCALED
from mx_jax.formats.element import unknown_name

# What stands before the reference is checked on the hardware that it accepts; of `xla_scaled` and
# `pallas_tpu`, that XLA compiles it for that hardware. What stands behind the reference is not yet:
# `select` and `find` ask it only where `prefer_backends` or `only_backend` names it, also for calls
# that the reference refuses. Once measured, its place is the first.
BACKENDS: tuple[Backend, ...] = (
    *(XLA, CPU_FFI, XLA_SCALED, PALLAS_TPU, XLA_BFLOAT16, XLA_ROUNDED),
    *(REFERENCE, PALLAS_GPU),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The backend that takes a call, and why each one before it does not."""

    backend: Backend
    offer: Offer  # `offer.run` computes this call
    rejections: tuple[tuple[str, str], ...]  # (name, reason) of those tried before
    measured: Row | None = None  # what was measured of it, where it is fastest

    def noting(self, note: str) -> "Choice":
        """The same, with more said about how."""
        how = "; ".join(filter(None, (self.offer.how, note)))
        return dataclasses.replace(self, offer=dataclasses.replace(self.offer, how=how))


def select(call: Call, target: Target | None = None) -> Choice:
    """The first of `known_backends` that does not reject the call."""
    # All reject only under `only_backend`: the error lists every reason.
    target = current_target() if target is None else target
    choice, rejections = ask(call, target)
    if choice is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in rejections)
        raise ValueError(f"no backend takes {call} on {target}: {reasons}")
    return choice


def find(call: Call, target: Target) -> Choice | None:
    """As `select`, for calls that can be made of others: None if all that are asked reject."""
    return ask(call, target)[0]


def ask(call: Call, target: Target) -> tuple[Choice | None, tuple[tuple[str, str], ...]]:
    """The first backend that accepts; the name of each before it, and its reason."""
    target, table = _counted(target), {backend.name: backend for backend in known_backends()}
    only = only_named.value
    row = row_about(call, target) if only is None else None
    unasked = _unasked(row)
    # Those that are preferred by name, the one that was measured to be the fastest, the others.
    names = [*preferred_names.value, *([row.backend] if row else []), *table]
    rejections: list[tuple[str, str]] = []
    for name in (own for own in dict.fromkeys(names) if own in table):
        backend, offer = table[name], table[name].offers.get(type(call))
        if only is not None and name != only:
            reason = f"not asked: only_backend({only!r})"
        elif name in unasked:
            reason = f"not asked: {_why_unasked(target)}; prefer_backends({name!r}) asks it"
        elif offer is None:
            reason = NOT_OFFERED[type(call)]
        elif (reason := offer.rejects(call, target)) is None:
            if offer.describes is not None:
                offer = dataclasses.replace(offer, how=offer.describes(call))
            tried = tuple(rejections)
            own = row if row is not None and row.backend == name else None
            return Choice(backend=backend, offer=offer, rejections=tried, measured=own), tried
        rejections.append((name, reason))
    return None, tuple(rejections)


def on_request(call: Call, target: Target) -> tuple[tuple[str, str], ...]:
    """(name, why) of the backends that are asked only by name and would take the call."""
    if only_named.value is not None:
        return ()
    target = _counted(target)
    unasked, why = _unasked(row_about(call, target)), _why_unasked(target)
    return tuple(
        (backend.name, why)
        for backend in known_backends()
        if backend.name in unasked and backend.rejects(call, target) is None
    )


def _unasked(row: Row | None) -> set[str]:
    """Names of those behind the reference for which neither a name nor a measurement speaks."""
    names = [backend.name for backend in known_backends()]
    behind, measured = names[names.index(REFERENCE.name) + 1 :], row and row.backend
    return {*behind} - {only_named.value, *preferred_names.value, measured}


def _why_unasked(target: Target) -> str:
    """Why what stands behind the reference is asked only by name."""
    if target.num_devices > 1:
        return f"not measured on several devices, got num_devices={target.num_devices}"
    return f"nothing was measured of this on {target.device_kind or 'this machine'}"


def _counted(target: Target) -> Target:
    """The machine as a program of one device has it, where the devices are not counted."""
    return target if target.counted else dataclasses.replace(target, num_devices=1, counted=True)


# Overrides enter the jit cache key, `target.only_named` too: a function traced under one backend is
# not reused for another.
preferred_names: Any = jax.make_user_context(default_value=())
added_backends: Any = jax.make_user_context(default_value=())


def only_backend(name: str | None) -> contextlib.AbstractContextManager[None]:
    """A context in which only the named backend is asked, and what it rejects is an error.

    For tests and for measuring one backend. It enters jit's cache key.

    Args:
      name: of a backend, as `inspect.explain` prints it; None lifts an outer restriction.

    Returns:
      The context manager.

    Raises:
      ValueError: unknown name; the message lists the known.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> with mx_jax.only_backend("reference"):
      ...     mx_jax.quantize(jnp.ones(32), "mxfp4").shape
      (32,)
    """
    if name is not None:
        _check_known("only_backend", name)
    return only_named(name)


def prefer_backends(*names: str) -> contextlib.AbstractContextManager[None]:
    """A context in which the named backends are asked first, and all others after them.

    What they reject goes to the next, as it always does. This is how to use a backend that stands
    behind the reference, such as the GPU kernels, where nothing was measured of it. It enters jit's
    cache key.

    Args:
      names: of backends, in order of preference; none lifts an outer preference.

    Returns:
      The context manager.

    Raises:
      ValueError: unknown name; the message lists the known.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> x = mx_jax.quantize(jnp.ones((4, 32)), "mxfp4")
      >>> with mx_jax.prefer_backends("pallas_gpu"):
      ...     mx_jax.matmul(x, jnp.ones((32, 2)), recipe=mx_jax.recipes.mxfp4()).shape
      (4, 2)
    """
    for name in names:
        _check_known("prefer_backends", name)
    return preferred_names(names)


def with_backends(*backends: Backend) -> contextlib.AbstractContextManager[None]:
    """A context with more backends than the table's, asked before those.

    For trying a backend, or one that belongs to another package. It enters jit's cache key.

    Args:
      backends: in order of preference, of other names than the table's; none lifts an outer
        addition.

    Returns:
      The context manager.

    Raises:
      ValueError: a name that is taken.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> from mx_jax.backends.target import Backend, Offer
      >>> from mx_jax.backends.calls import DequantizeCall
      >>> from mx_jax.backends.select import with_backends
      >>> zeros = Offer(
      ...     call=DequantizeCall,
      ...     rejects=lambda call, target: None if call.shape == (32,) else "needs 32 values",
      ...     run=lambda x, call: jnp.zeros(x.shape, call.dtype),
      ... )
      >>> with with_backends(Backend(name="zeros", epsilon_bound=0.0, table=(zeros,))):
      ...     mx_jax.cast(jnp.ones(32), "mxfp4").sum()
      Array(0., dtype=float32)
    """
    names = [backend.name for backend in (*backends, *BACKENDS)]
    taken = sorted({name for name in names if names.count(name) > 1})
    if taken:
        raise ValueError(f"with_backends: each backend needs a name of its own, got names={taken}")
    return added_backends(backends)


def known_backends() -> tuple[Backend, ...]:
    """Those that `with_backends` adds, and the table's."""
    return (*added_backends.value, *BACKENDS)


def _check_known(operation: str, name: str) -> None:
    known = [backend.name for backend in known_backends()]
    if name not in known:
        raise ValueError(f"{operation}: {unknown_name('backend name', name, known)}")
