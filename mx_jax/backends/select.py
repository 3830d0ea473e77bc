"""Which backend takes a call: a pure function, so the whole table is testable on any machine."""

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from mx_jax.backends import named
from mx_jax.backends import target as machine
from mx_jax.backends.base import NOT_OFFERED, Backend, Offer, Target
from mx_jax.backends.calls import Call, PackCall, QuantizeBothCall, QuantizeCall
from mx_jax.backends.evidence import Row, row_about, switches_on, why_asleep
from mx_jax.backends.named import known_backends as known_backends
from mx_jax.backends.named import only_backend as only_backend
from mx_jax.backends.named import prefer_backends as prefer_backends
from mx_jax.backends.named import with_backends as with_backends
from mx_jax.backends.primitive import Implementations, Singly, Unpacking
from mx_jax.backends.records import Selection, active
from mx_jax.backends.table import REFERENCE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The backend that takes a call, and why each one before it does not.

    Attributes:
      backend: the first that accepts.
      offer: what it offers for such calls; `offer.run` computes this one.
      rejections: (name, reason) of those tried before.
      target: the machine.
      evidence: the measurement that it is asked for; None if it is asked anyway.
    """

    backend: Backend
    offer: Offer
    target: Target
    rejections: tuple[tuple[str, str], ...]
    evidence: Row | None = None


def select(
    call: Call, target: Target | None = None, backends: Sequence[Backend] | None = None
) -> Choice:
    """The first backend, in order of preference, that does not reject the call.

    Args:
      call: description of the work.
      target: description of the machine; None: `current_target`.
      backends: candidates, in order; None: `known_backends`.

    Raises:
      ValueError: if all reject, which happens only under `only_backend`; every reason is listed.
    """
    choice, target, rejections = _ask(call, target, backends)
    if choice is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in rejections)
        raise ValueError(f"no backend takes {call} on {target}: {reasons}")
    return choice


def find(
    call: Call, target: Target | None = None, backends: Sequence[Backend] | None = None
) -> Choice | None:
    """As `select`, for calls that can be made of others: None if all that are asked reject."""
    return _ask(call, target, backends)[0]


def on_request(
    call: Call, target: Target, backends: Sequence[Backend]
) -> tuple[tuple[str, str], ...]:
    """(name, why) of the backends that are asked only by name and would take the call."""
    asleep = only_if_named(backends) - {named.only.value, *named.preferred.value}
    rows = _measured(call, target, backends, asleep)
    return tuple(
        (backend.name, why_asleep(rows.get(backend.name), target))
        for backend in backends
        if backend.name in asleep
        and backend.rejects(call, target) is None
        and not (named.only.value is None and switches_on(call, rows.get(backend.name)))
    )


def _measured(
    call: Call, target: Target, backends: Sequence[Backend], names: Container[str]
) -> dict[str, Row]:
    """What evidence says of those of these names that take the call, on one device."""
    if target.device_kind is None or target.num_devices > 1:
        return {}
    found = {
        backend.name: row_about(call, backend, target)
        for backend in backends
        if backend.name in names and backend.rejects(call, target) is None
    }
    return {name: row for name, row in found.items() if row is not None}


def _ask(
    call: Call, target: Target | None, backends: Sequence[Backend] | None
) -> tuple[Choice | None, Target, list[tuple[str, str]]]:
    """The choice, for which machine, and (name, reason) of those that reject."""
    target = current_target() if target is None else target
    backends = known_backends() if backends is None else backends
    asked = target if target.counted else dataclasses.replace(target, num_devices=1, counted=True)
    choice, rejections = _first(call, asked, backends)
    if choice is not None:
        choice = _bound(choice, call, target, backends)
    if active.value is not None:
        choice = _recorded(call, target, asked, backends, choice, rejections)
    return choice, target, rejections


def _bound(
    choice: Choice, call: Call, target: Target, backends: Sequence[Backend]
) -> Choice | None:
    """What is chosen as an equation, whose lowering runs something else where it has to: elsewhere
    the reference, and where the devices are not counted what several would choose."""
    offer, name = choice.offer, choice.backend.name
    if isinstance(call, PackCall):  # what a layout gives is a type of its own
        return choice
    other, platform, one_device = offer.run, offer.platform, False
    if not target.counted:
        several, other_name = _on_several(call, dataclasses.replace(target, counted=True), backends)
        if several is None:
            return None
        if other_name != name:
            how = f"by {other_name} where the program has several devices"
            offer = dataclasses.replace(offer, how=f"{offer.how}; {how}" if offer.how else how)
            other, platform, one_device = several, target.platform, True
    if offer.inline and not one_device:
        return choice
    if platform is not None and not one_device:
        other = _reference(call)
    run = Implementations(offer.run, other, platform, one_device)
    return dataclasses.replace(choice, offer=dataclasses.replace(offer, run=run), target=target)


def _reference(call: Call) -> Callable[..., Any]:
    """What gives the reference's results."""
    offers = REFERENCE.offers
    if isinstance(call, QuantizeBothCall):
        return Singly(offers[QuantizeCall].run, offers[QuantizeCall].run)
    return Unpacking(offers[type(call)].run)


def _on_several(
    call: Call, target: Target, backends: Sequence[Backend]
) -> tuple[Callable[..., Any] | None, str]:
    """What runs a call there, if anything does, and its backend's name."""
    choice, _ = _first(call, target, backends)
    if choice is not None:
        return Unpacking(choice.offer.run), choice.backend.name
    if not isinstance(call, QuantizeBothCall):
        return None, ""
    (first, name), (second, other) = (
        _on_several(single, target, backends) for single in (call.first, call.second)
    )
    if first is None or second is None:
        return None, ""
    return Singly(first, second), name if name == other else f"{name} and {other}"


def _first(
    call: Call, target: Target, backends: Sequence[Backend]
) -> tuple[Choice | None, list[tuple[str, str]]]:
    """The first that accepts, on a machine whose devices are counted."""
    only, preferred = named.only.value, named.preferred.value
    unproved = only_if_named(backends) - {only, *preferred}
    rows = {} if only is not None else _measured(call, target, backends, unproved)
    proved = {name: row for name, row in rows.items() if switches_on(call, row)}
    rejections: list[tuple[str, str]] = []
    for backend in _in_order(backends, proved):
        offer, name = backend.offers.get(type(call)), backend.name
        if only is not None and name != only:
            reason = f"not asked: only_backend({only!r})"
        elif name in unproved and name not in proved:
            reason = f"not asked: {rows.get(name, 'not proved on hardware')}; "
            reason += f"prefer_backends({name!r}) asks it"
        elif offer is None:
            reason = NOT_OFFERED[type(call)]
        elif (reason := offer.rejects(call, target)) is None:
            row = proved.get(name)
            offer = offer if row is None else backend.offer(call, row.kernel, row.config)
            tried = tuple(rejections)
            choice = Choice(
                backend=backend, offer=offer, rejections=tried, target=target, evidence=row
            )
            return choice, rejections
        rejections.append((name, reason))
    return None, rejections


def _in_order(backends: Sequence[Backend], proved: Mapping[str, Row]) -> list[Backend]:
    """Those that are preferred by name, those that were measured, the fastest first, the others."""
    first = [
        backend
        for name in dict.fromkeys(named.preferred.value)
        for backend in backends
        if backend.name == name
    ]
    first += sorted(
        (backend for backend in backends if backend.name in proved),
        key=lambda backend: -proved[backend.name].speed,
    )
    return [*first, *(backend for backend in backends if backend not in first)]


def _recorded(
    call: Call,
    target: Target,
    asked: Target,
    backends: Sequence[Backend],
    choice: Choice | None,
    rejections: Sequence[tuple[str, str]],
) -> Choice | None:
    """Tell whoever records what was decided; the choice, under its name if the recorder marks."""
    active.value.entries.append(
        Selection(
            call=call,
            target=target,
            backend=None if choice is None else choice.backend.name,
            rejections=tuple(rejections),
            on_request=on_request(call, asked, backends),
            how="" if choice is None else choice.offer.how,
            evidence=None if choice is None else choice.evidence,
        )
    )
    if choice is None:
        return None
    return dataclasses.replace(choice, offer=active.value.marked(choice.offer))


def only_if_named(backends: Sequence[Backend] | None = None) -> set[str]:
    """Names of those behind the reference, which nothing but their name reaches."""
    backends = known_backends() if backends is None else backends
    places = [place for place, backend in enumerate(backends) if backend == REFERENCE]
    return {backend.name for backend in backends[places[0] + 1 :]} if places else set()


def current_target(num_devices: int | None = None) -> Target:
    """The machine that a call is for: see `target.current_target`.

    Args:
      num_devices: None: those of the machine; under `only_backend` one, since who names a backend
        takes it as it is with sharded arrays.
    """
    if num_devices is None and named.only.value is not None:
        num_devices = 1
    return machine.current_target(num_devices)
