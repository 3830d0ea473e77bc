"""Which backend takes a call: a pure function, so the whole table is testable on any machine."""

import contextlib
import dataclasses

from mx_jax.backends.calls import Call
from mx_jax.backends.cpu_ffi import CPU_FFI
from mx_jax.backends.measured import Row, row_about
from mx_jax.backends.pallas_gpu import PALLAS_GPU
from mx_jax.backends.pallas_tpu import PALLAS_TPU
from mx_jax.backends.reference import REFERENCE
from mx_jax.backends.target import (
    Backend,
    Offer,
    SelectionContext,
    Target,
    current_target,
    selecting,
    selection,
)
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
    offer: Offer
    label: str  # what computes it, where the backend's name does not say it
    rejections: tuple[tuple[str, str], ...]  # (name, reason) of those tried before
    measured: Row | None = None  # what was measured of it, where it is fastest

    def noting(self, note: str) -> "Choice":
        """The same, with more in its label."""
        return dataclasses.replace(self, label="; ".join(filter(None, (self.label, note))))


def select(call: Call, target: Target | None = None) -> Choice:
    """The first of `known_backends` that does not reject the call.

    Raises:
      ValueError: if all reject, which happens only under `only_backend`; every reason is listed.
    """
    target = current_target() if target is None else target
    choice, rejections = _first_taker(call, target)
    if choice is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in rejections)
        raise ValueError(f"no backend takes {call} on {target}: {reasons}")
    return choice


def find(call: Call, target: Target) -> Choice | None:
    """As `select`, for calls that can be made of others: None if all that are asked reject."""
    return _first_taker(call, target)[0]


def _first_taker(call: Call, target: Target) -> tuple[Choice | None, tuple[tuple[str, str], ...]]:
    """The choice; the name of each backend before it, and its reason."""
    target, context = _counted(target), selection()
    table = {backend.name: backend for backend in (*context.added, *BACKENDS)}
    row = row_about(call, target) if context.only is None else None
    unasked = _unasked(row, target, context, list(table))
    # Those that are preferred by name, the one that was measured to be the fastest, the others.
    names: dict[str, None] = dict.fromkeys(
        [*context.preferred, *([row.backend] if row else []), *table]
    )
    rejections: list[tuple[str, str]] = []
    for name in names:
        backend = table.get(name)
        if backend is None:
            continue
        if context.only is not None and name != context.only:
            reason = f"not asked: only_backend({context.only!r})"
        elif name in unasked:
            reason = f"not asked: {unasked[name]}; prefer_backends({name!r}) asks it"
        elif (offer := backend.offers.get(type(call))) is None:
            reason = backend.rejects(call, target)
        elif (reason := offer.rejects(call, target)) is None:
            return Choice(
                backend=backend,
                offer=offer,
                label=offer.label if isinstance(offer.label, str) else offer.label(call),
                rejections=tuple(rejections),
                measured=row if row is not None and row.backend == name else None,
            ), ()
        rejections.append((name, str(reason)))
    return None, tuple(rejections)


def on_request(call: Call, target: Target) -> tuple[tuple[str, str], ...]:
    """(name, why) of the backends that are asked only by name and would take the call."""
    target, context = _counted(target), selection()
    if context.only is not None:
        return ()
    table = {backend.name: backend for backend in known_backends()}
    unasked = _unasked(row_about(call, target), target, context, list(table))
    return tuple(
        (name, why) for name, why in unasked.items() if table[name].rejects(call, target) is None
    )


def _unasked(
    row: Row | None, target: Target, context: SelectionContext, names: list[str]
) -> dict[str, str]:
    """Backends behind the reference that are asked only by name, for nothing was measured; why."""
    why = f"nothing was measured of this on {target.device_kind or 'this machine'}"
    if target.num_devices > 1:
        why = f"not measured on several devices, got num_devices={target.num_devices}"
    behind = names[names.index(REFERENCE.name) + 1 :]
    named = {context.only, *context.preferred, row and row.backend}
    return {name: why for name in behind if name not in named}


def _counted(target: Target) -> Target:
    """The machine as a program of one device has it, where the devices are not counted."""
    return target if target.counted else dataclasses.replace(target, num_devices=1, counted=True)


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
    return selecting(only=name)


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
    return selecting(preferred=names)


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
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(
            f"with_backends: each backend needs a name of its own, got names={repeated}"
        )
    return selecting(added=backends)


def known_backends() -> tuple[Backend, ...]:
    """Those that `with_backends` adds, and the table's."""
    return (*selection().added, *BACKENDS)


def _check_known(operation: str, name: str) -> None:
    known = [backend.name for backend in known_backends()]
    if name not in known:
        raise ValueError(f"{operation}: {unknown_name('backend name', name, known)}")
