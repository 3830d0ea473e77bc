"""Casts that are measured: bit for bit the reference's, beside the plain code and a copy."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.backends.calls import QuantizeBothCall, QuantizeCall
from mx_jax.backends.reference import REFERENCE
from mx_jax.backends.select import current_target
from mx_jax.backends.target import Backend
from mx_jax.measure.cases import Case
from mx_jax.measure.subject import (
    BFLOAT16,
    KERNEL,
    PLAIN,
    Subject,
    kernel_of,
    plain_path,
    same_bits,
)
from mx_jax.measure.timing import Way
from mx_jax.reference.scale_rules import SCALE_RULES
from mx_jax.testing.cases import QuantizeCase

AnyCast = QuantizeCall | QuantizeBothCall
# What is checked of every rule for scales: all bit patterns, in several tiles and not whole ones.
_SHAPE = (96, 1024)


def subject(case: Case, backend: Backend, copies: int) -> Subject:
    """Casts of as many arrays as copies.

    What was timed is compared with the plain code's bits, that of the first array also with the
    reference's on a CPU, since XLA compiles the plain code anew for a GPU.

    Args:
      case: of a kind of cast.
      backend: whose kernel it is.
      copies: of arrays.
    """
    call = case.call
    assert isinstance(call, AnyCast)
    draw = jax.jit(lambda key: jax.random.normal(key, case.shape, jnp.dtype(case.dtype)))
    arrays = [draw(key) for key in jax.random.split(jax.random.key(0), copies)]
    plain = _plain(call)
    run = _cast(kernel_of(backend, call), call)
    nothing = jnp.zeros((), jnp.int32)
    ways = {
        KERNEL: Way(one=lambda _, x: run(x), x=nothing, copies=arrays),
        PLAIN: Way(one=lambda _, x: plain(x), x=nothing, copies=arrays),
        # A copy; not x + 0, which XLA knows to be x.
        BFLOAT16: Way(one=lambda _, x: -x, x=nothing, copies=arrays),
    }
    once = jax.jit(plain)

    def error(outs: list[Any]) -> float:
        alike = all(same_bits(out, once(x)) for out, x in zip(outs, arrays, strict=True))
        right = alike and _as_on_a_cpu(outs[0], np.asarray(arrays[0]), call)
        return 0.0 if right else math.inf

    return Subject(ways=ways, error=error, elsewhere=_of_every_rule(case, backend))


def _cast(run: Callable[..., Any], call: AnyCast) -> Callable[[jax.Array], Any]:
    if isinstance(call, QuantizeBothCall):
        return lambda x: run(x, (None, None), None, call)
    return lambda x: run(x, None, None, call)


def _singles(call: AnyCast) -> tuple[QuantizeCall, ...]:
    return (call.first, call.second) if isinstance(call, QuantizeBothCall) else (call,)


def _plain(call: AnyCast) -> Callable[[jax.Array], Any]:
    """One call if something takes it without evidence, else one cast after the other."""
    choice = plain_path(call)
    if choice is not None:
        return _cast(choice.offer.run, call)
    runs = [_plain(single) for single in _singles(call)]
    return lambda x: tuple(run(x) for run in runs)


def _as_on_a_cpu(actual: Any, x: np.ndarray, call: AnyCast) -> bool:
    """Whether codes and scales are the reference's."""
    results = actual if isinstance(call, QuantizeBothCall) else (actual,)
    with jax.default_device(jax.devices("cpu")[0]):
        for out, single in zip(results, _singles(call), strict=True):
            expected = jax.jit(_cast(REFERENCE.offers[QuantizeCall].run, single))(x)
            pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(out), strict=True)
            if not all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs):
                return False
    return True


def _of_every_rule(case: Case, backend: Backend) -> list[Callable[[], float]]:
    """A row says nothing of rules for scales: so all that the kernel computes are checked."""
    found = []
    for rule in SCALE_RULES:
        singles = [
            QuantizeCase(
                format=single.format, shape=_SHAPE, axis=a, dtype=case.dtype, scale_rule=rule.name
            )
            for single, a in zip(_singles(_cast_of(case)), case.axes, strict=True)
            if single.format.scale.kind in rule.kinds
        ]
        if len(singles) == len(case.axes):
            first, *others = (single.call for single in singles)
            call = QuantizeBothCall(first=first, second=others[0]) if others else first
            if backend.rejects(call, current_target(1)) is None:
                found.append(functools.partial(_any_bits, call, backend))
    return found


def _cast_of(case: Case) -> AnyCast:
    call = case.call
    assert isinstance(call, AnyCast)
    return call


def _any_bits(call: AnyCast, backend: Backend) -> float:
    """0 if a cast of random bits, NaN, Inf and subnormals among them, is right, else infinity.

    One NaN would be all that a scale of the whole tensor sees: there numbers of many octaves.
    """
    single, rng = _singles(call)[0], np.random.default_rng(0)
    if single.format.tensor_scale:
        x = (rng.normal(size=_SHAPE) * 2.0 ** rng.uniform(-30, 10, _SHAPE)).astype(single.dtype)
    else:
        size = single.dtype.itemsize
        x = rng.integers(0, 256, (*_SHAPE, size), np.uint8).view(single.dtype)[..., 0]
    run = jax.jit(_cast(kernel_of(backend, call), call))
    return 0.0 if _as_on_a_cpu(run(jnp.asarray(x)), x, call) else math.inf
