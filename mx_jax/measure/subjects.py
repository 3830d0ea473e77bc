"""What a case's process measures: the kernel, what it is compared with, and whether it is right."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.backends import evidence
from mx_jax.backends.calls import Call, MatmulCall, QuantizeBothCall, QuantizeCall, RaggedCall
from mx_jax.backends.reference import REFERENCE
from mx_jax.backends.select import Choice, current_target, find, select
from mx_jax.backends.target import Backend
from mx_jax.formats import block_format
from mx_jax.measure.cases import Case, takes
from mx_jax.measure.timing import Way
from mx_jax.mxarray import MXArray
from mx_jax.ops.quantize import quantize
from mx_jax.packed import PackedMXArray
from mx_jax.reference.matmul import scaled_matmul
from mx_jax.reference.ragged import grouped_dot, ragged_rows, scaled_ragged_dot
from mx_jax.reference.scale_rules import SCALE_RULES
from mx_jax.testing.cases import QuantizeCase

KERNEL, PLAIN, UNPACKING, BFLOAT16 = "kernel", "plain path", "unpacking first", "bfloat16"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """All that a case needs, once its arrays are made.

    Attributes:
      ways: to compute the same; `KERNEL` and `BFLOAT16` are among them, and `PLAIN` unless that is
        the kernel itself.
      error: the largest error of what the timed kernel gave, a list of one for each copy, over what
        is allowed; infinity where only the same bits are right, and they are not.
      elsewhere: checks of what else the row stands for, each an error over what is allowed.
      plain: name of the backend that the plain path is; empty where it takes several.
    """

    ways: Mapping[str, Way]
    error: Callable[[list[Any]], float]
    elsewhere: Sequence[Callable[[], float]] = ()
    plain: str = ""


def subject(case: Case, backend: Backend, copies: int) -> Subject:
    """What a case measures.

    Args:
      case: of any kind.
      backend: whose kernel it is.
      copies: of weights, of gradients whose rows are summed, or of what is cast.
    """
    is_cast = case.kind in ("cast", "cast both ways")
    return (_cast_subject if is_cast else _product_subject)(case, backend, copies)


def kernel_of(backend: Backend, call: Call) -> Callable[..., Any]:
    """A backend's own way, whatever selection would say.

    Raises:
      ValueError: it does not take the call.
    """
    target = current_target(1)
    reason = backend.rejects(call, target)
    if reason is not None:
        raise ValueError(f"gpu: {backend.name} does not take this on {target}: {reason}")
    return backend.offers[type(call)].run


def _plain_path(call: Call) -> Choice:
    """What computes a call without any row."""
    with evidence.use(()):
        return select(call, current_target(1))


# Products -----------------------------------------------------------------------------------------


class _Operands(NamedTuple):
    """The arrays of a product.

    Attributes:
      x: what every copy meets: rows and, where they are in groups, the sizes of those.
      weights: quantized, one of each copy; gradients, where rows are summed.
      given: the same as the kernel reads them: packed, if the case says so.
      dense_x: as x, for XLA's own product in bfloat16.
      dense: the copies for that.
    """

    x: tuple[Any, ...]
    weights: list[MXArray]
    given: list[Any]
    dense_x: tuple[Any, ...]
    dense: list[jax.Array]


def _operands(case: Case, backend: Backend, copies: int, sizes: Any = None) -> _Operands:
    m, n, k = case.shape
    sums = case.kind == "ragged sums"
    dtype = jnp.dtype(case.dtype)
    lhs, rhs = (None if name is None else block_format(name) for name in case.formats)
    shape = (m, n) if sums else (case.groups, k, n) if case.groups else (n, k)
    shape = (k, n) if case.k_first else shape
    assert rhs is not None
    axis = -2 if case.groups or case.k_first else -1
    sizes = uneven(case) if sizes is None else sizes
    rows = jax.random.normal(jax.random.key(1), (m, k), dtype)
    draw = jax.jit(lambda key: jax.random.normal(key, shape, dtype))
    dense = [draw(key) for key in jax.random.split(jax.random.key(0), copies)]
    x, taken, cast = rows, sizes, jax.jit(lambda w: quantize(w, rhs, axis=axis))
    if sums:
        # Along the rows, in a layout whose groups begin with blocks, as a training step casts.
        layout = ragged_rows(sizes, m, case.unit)
        cast = jax.jit(lambda x: quantize(layout.place(x), rhs, axis=-2))
        x, taken = cast(rows), layout.sizes
    elif lhs is not None:
        x = jax.jit(lambda x: quantize(x, lhs))(rows)
    weights = given = [cast(w) for w in dense]
    if case.packed:
        given = _packed(weights, kernel_of(backend, case.packing), case)
    plain = rows.astype(jnp.bfloat16), [w.astype(jnp.bfloat16) for w in dense]
    of_groups = (lambda x, sizes: (x, sizes)) if case.groups else (lambda x, sizes: (x,))
    return _Operands(of_groups(x, taken), weights, given, of_groups(plain[0], sizes), plain[1])


def _packed(weights: list[MXArray], pack: Callable[..., Any], case: Case) -> list[Any]:
    lay_out = jax.jit(lambda w: pack(w, case.packing))
    return [lay_out(w) for w in weights]


def uneven(case: Case) -> jax.Array:
    """Rows of each group, int32 `[g]`: some have most, some have none, and some rows no group."""
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.full(max(case.groups, 1), 0.5))
    return jnp.asarray(rng.multinomial(case.shape[0] - case.shape[0] // 16, shares), jnp.int32)


def _product_subject(case: Case, backend: Backend, copies: int) -> Subject:
    operands = _operands(case, backend, copies)
    call, unpacked = case.call, dataclasses.replace(case, packed=False).call

    def way(run: Callable[..., Any], call: Call, copies: list[Any], take: Any = lambda w: w) -> Way:
        def one(x: Any, w: Any) -> jax.Array:
            return run(x[0], take(w), *x[1:], call)

        return Way(one=one, x=operands.x, copies=copies)

    in_bfloat16 = functools.partial(_in_bfloat16, case)
    ways = {
        KERNEL: way(kernel_of(backend, call), call, operands.given),
        BFLOAT16: Way(one=in_bfloat16, x=operands.dense_x, copies=operands.dense),
    }
    assert isinstance(unpacked, MatmulCall | RaggedCall), unpacked
    plain_call, laid_out = unpacked, operands.weights
    if case.packed:
        run = _plain_path(unpacked).offer.run
        ways[UNPACKING] = way(run, unpacked, operands.given, lambda w: w.unpack())
        # Without the kernel `pack_weights` lays out for the plain path, where that has a layout.
        packing = _plain_path(case.packing)
        laid_out = _packed(laid_out, packing.offer.run, case)
        if isinstance(laid_out[0], PackedMXArray):
            rhs = dataclasses.replace(unpacked.rhs, packed_by=packing.backend.name)
            plain_call = dataclasses.replace(unpacked, rhs=rhs)
    plain = _plain_path(plain_call)
    if plain.backend != backend:
        ways[PLAIN] = way(plain.offer.run, plain_call, laid_out)

    def error(outs: list[Any]) -> float:
        pairs = zip(outs, operands.weights, strict=True)
        return max(_error(out, operands.x, w, unpacked, backend) for out, w in pairs)

    checks = [
        functools.partial(_error_elsewhere, other, backend, sizes)
        for other, sizes in _elsewhere(case)
        if takes(backend, other, current_target(1))
    ]
    return Subject(ways=ways, error=error, elsewhere=checks, plain=plain.backend.name)


def _in_bfloat16(case: Case, x: tuple[Any, ...], w: jax.Array) -> jax.Array:
    """The product by XLA."""
    if case.kind == "ragged sums":
        return grouped_dot(x[0], w, x[1], (-2, -2), None, jnp.bfloat16)
    if case.groups:
        return lax.ragged_dot(x[0], w, x[1], preferred_element_type=jnp.bfloat16)
    numbers = (((1,), (1,)), ((), ()))
    return lax.dot_general(x[0], w, numbers, preferred_element_type=jnp.bfloat16)


def _elsewhere(case: Case) -> Iterator[tuple[Case, jax.Array | None]]:
    """What else a row stands for: the ends of its bucket of rows, and sizes that no tile divides.

    Of groups: all rows in the last one, and none in any.
    """
    rows, n, k = case.shape
    odd_n, odd_k = min(n, 1024) - 24, min(k, 2048)
    if case.groups:
        last = jnp.zeros(case.groups, jnp.int32).at[-1].set(rows)
        yield from ((case, last), (case, jnp.zeros_like(last)))
        yield dataclasses.replace(case, shape=(rows + 5, odd_n, odd_k + 32)), None
        return
    for end in sorted({case.work.lowest_rows, case.work.rows} - {rows, math.inf}):
        yield dataclasses.replace(case, shape=(int(end), n, k)), None
    # Weights of either order.
    for over, k_first in ((32, True), (40, False)):
        yield dataclasses.replace(case, shape=(rows, odd_n, odd_k + over), k_first=k_first), None


def _error_elsewhere(case: Case, backend: Backend, sizes: jax.Array | None) -> float:
    """The error of a product of fresh operands."""
    operands, call = _operands(case, backend, 1, sizes), case.call
    run, (given,), (w,) = kernel_of(backend, call), operands.given, operands.weights
    out = jax.jit(lambda x, w: run(x[0], w, *x[1:], call))(operands.x, given)
    return _error(out, operands.x, w, dataclasses.replace(case, packed=False).call, backend)


def _error(out: jax.Array, x: Any, w: MXArray, call: Call, backend: Backend) -> float:
    return float(_jitted_error(out, x, w, call=call, bound=backend.epsilon_bound))


@functools.partial(jax.jit, static_argnames=("call", "bound"))
def _jitted_error(out: jax.Array, x: Any, w: MXArray, *, call: Any, bound: float) -> jax.Array:
    """The largest error over what a backend's bound, and one rounding to the dtype, allow."""
    assert isinstance(call, MatmulCall | RaggedCall)

    def multiply(rows: Any, w: Any) -> jax.Array:
        highest, dtype = lax.Precision.HIGHEST, jnp.dtype("float32")
        if isinstance(call, MatmulCall):
            return scaled_matmul(rows, w, call.dimension_numbers, dtype, precision=highest)
        return scaled_ragged_dot(rows, w, x[1], call.contracting, dtype, highest)

    length = math.prod(call.lhs.shape[axis] for axis in call.lhs.axes.contracting)
    expected, magnitude = multiply(x[0], w), multiply(_absolute(x[0]), _absolute(w))
    # Twice: the reference has an error of its own.
    allowed = 2 * bound * math.sqrt(length) * 2.0**-24 * magnitude
    info = jnp.finfo(out.dtype)
    allowed += float(info.eps) / 2 * (jnp.abs(expected) + allowed) + float(info.smallest_normal)
    actual = out.astype(jnp.float32)
    error = jnp.where(actual == expected, 0.0, jnp.abs(actual - expected) / allowed)
    # What is NaN on one side only is wrong by any measure.
    return jnp.max(jnp.where(jnp.isnan(error), jnp.inf, error))


def _absolute(operand: Any) -> jax.Array:
    """Magnitudes of an operand's values, in float32."""
    dense = operand.dequantize(jnp.float32) if isinstance(operand, MXArray) else operand
    return jnp.abs(dense.astype(jnp.float32))


# Casts --------------------------------------------------------------------------------------------

AnyCast = QuantizeCall | QuantizeBothCall
# What is checked of every rule for scales: all bit patterns, in several tiles and not whole ones.
_SHAPE = (96, 1024)


def _cast_subject(case: Case, backend: Backend, copies: int) -> Subject:
    """What was timed is compared with the plain code's bits, that of the first array also with the
    reference's on a CPU, since XLA compiles the plain code anew for a GPU."""
    call = case.call
    assert isinstance(call, AnyCast)
    draw = jax.jit(lambda key: jax.random.normal(key, case.shape, jnp.dtype(case.dtype)))
    arrays = [draw(key) for key in jax.random.split(jax.random.key(0), copies)]
    run, plain, nothing = _cast(kernel_of(backend, call), call), _plain_cast(call), jnp.int32(0)
    ways = {
        KERNEL: Way(one=lambda _, x: run(x), x=nothing, copies=arrays),
        # A copy; not x + 0, which XLA knows to be x.
        BFLOAT16: Way(one=lambda _, x: -x, x=nothing, copies=arrays),
    }
    if backend != REFERENCE:
        ways[PLAIN] = Way(one=lambda _, x: plain(x), x=nothing, copies=arrays)
    once = jax.jit(plain)

    def error(outs: list[Any]) -> float:
        alike = all(same_bits(out, once(x)) for out, x in zip(outs, arrays, strict=True))
        right = alike and _as_on_a_cpu(outs[0], np.asarray(arrays[0]), call)
        return 0.0 if right else math.inf

    return Subject(ways=ways, error=error, elsewhere=_every_rule(case, call, backend))


def _cast(run: Callable[..., Any], call: AnyCast) -> Callable[[jax.Array], Any]:
    bits = (None, None) if isinstance(call, QuantizeBothCall) else None
    return lambda x: run(x, bits, None, call)


def _singles(call: AnyCast) -> tuple[QuantizeCall, ...]:
    return (call.first, call.second) if isinstance(call, QuantizeBothCall) else (call,)


def _plain_cast(call: AnyCast) -> Callable[[jax.Array], Any]:
    """One call if something takes it without a row, else one cast after the other."""
    with evidence.use(()):
        choice = find(call, current_target(1))
        if choice is not None:
            return _cast(choice.offer.run, call)
        runs = [_plain_cast(single) for single in _singles(call)]
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


def _every_rule(case: Case, call: AnyCast, backend: Backend) -> list[Callable[[], float]]:
    """A row says nothing of rules for scales: so all that the kernel computes are checked."""
    found = []
    for rule in SCALE_RULES:
        if any(single.format.scale.kind not in rule.kinds for single in _singles(call)):
            continue
        casts = (
            QuantizeCase(
                format=single.format, shape=_SHAPE, axis=a, dtype=case.dtype, scale_rule=rule.name
            ).call
            for single, a in zip(_singles(call), case.axes, strict=True)
        )
        first, *others = casts
        other = QuantizeBothCall(first=first, second=others[0]) if others else first
        if backend.rejects(other, current_target(1)) is None:
            found.append(functools.partial(_any_bits, other, backend))
    return found


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


def same_bits(left: Any, right: Any) -> bool:
    """Whether two pytrees of arrays have the same bits, compared on their device."""
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(bool(_same(a, b)) for a, b in pairs)


@jax.jit
def _same(a: jax.Array, b: jax.Array) -> jax.Array:
    if a.shape != b.shape or a.dtype != b.dtype:
        return jnp.bool_(False)
    width = np.dtype(f"uint{8 * a.dtype.itemsize}")
    return jnp.all(lax.bitcast_convert_type(a, width) == lax.bitcast_convert_type(b, width))
