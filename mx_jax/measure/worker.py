"""The process of one case: it checks what a kernel gives, times it, and reports lines of JSON.

The last line counts. The first has what the clock says: what comes after may still fail, since not
every machine has the GPU's own clock in order.
"""

import dataclasses
import functools
import json
import math
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.backends import evidence
from mx_jax.backends.calls import Call, MatmulCall, RaggedCall
from mx_jax.backends.select import Choice, current_target, known_backends, select
from mx_jax.backends.target import Backend
from mx_jax.formats import block_format
from mx_jax.measure.cases import Case, copy_bits, takes
from mx_jax.mxarray import MXArray
from mx_jax.ops.quantize import quantize
from mx_jax.packed import PackedMXArray
from mx_jax.reference.matmul import scaled_matmul
from mx_jax.reference.ragged import grouped_dot, ragged_rows, scaled_ragged_dot

KERNEL, PLAIN, UNPACKING, BFLOAT16 = "kernel", "plain path", "unpacking first", "bfloat16"
_REPEATS = 5
# A sample takes at least so many seconds: the clock, and starting from Python, weigh little then.
_SAMPLE = 5e-3
# At the least, however long they take; and at the most.
_ROUNDS, _MAX_ROUNDS = 5, 200
# Copies together take so many bytes: far more than any GPU's L2 cache holds.
_BEYOND_CACHE = 384 << 20
_MAX_COPIES = 48

# What is reported.
Found = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """One way to compute what is timed.

    Attributes:
      one: computes it once, of x and a copy.
      x: what every copy meets.
      copies: together larger than the GPU's cache.
    """

    one: Callable[[Any, Any], Any]
    x: Any
    copies: Sequence[Any]

    def chain(self) -> Callable[[Any, Sequence[Any]], list[Any]]:
        """A jitted function of x and all copies: one after the other.

        Each waits for the one before it, without reading what that gave. The one inside is jitted
        too, so that it is lowered once.
        """
        one = jax.jit(self.one)

        def run(x: Any, copies: Sequence[Any]) -> list[Any]:
            outs: list[Any] = []
            for copy in copies:
                if outs:
                    x, copy, _ = lax.optimization_barrier((x, copy, outs[-1]))
                outs.append(one(x, copy))
            return outs

        return jax.jit(run)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """All that a case needs, once its arrays are made.

    Attributes:
      ways: to compute the same; `KERNEL` and `BFLOAT16` are among them, and `PLAIN` unless that is
        the kernel itself.
      error: the largest error of what the timed kernel gave, a list of one for each copy, over what
        is allowed.
      elsewhere: checks of what else the row stands for, each an error over what is allowed.
      plain: name of the backend that the plain path is.
    """

    ways: Mapping[str, Way]
    error: Callable[[list[Any]], float]
    elsewhere: Sequence[Callable[[], float]]
    plain: str


def answer(text: str) -> int:
    """Measure the case that a JSON text describes, in lines of JSON; returns the exit status.

    `"machine"` asks what machine this is. What fails after something was found goes to stderr.
    """
    reported: list[Found] = []

    def report(found: Found) -> None:
        reported.append(found)
        # At once: a process that ends by a signal writes nothing more.
        print(json.dumps(found), flush=True)

    facts = json.loads(text)
    try:
        if facts == "machine":
            target = current_target(1)
            names = "platform", "compute_capability", "device_kind"
            report({name: getattr(target, name) for name in names})
        else:
            case = Case.from_json(facts)
            known = {own.name: own for own in known_backends()}
            if case.backend not in known:
                raise ValueError(
                    f"gpu: knows no backend of this name, got backend={case.backend!r}"
                )
            measure(case, known[case.backend], report)
    except Exception as error:
        if reported:
            traceback.print_exc()
            return 1
        last = "".join(traceback.format_exception_only(error)).strip()
        report({"failed": last[:500], "traceback": traceback.format_exc()})
    return 0


def measure(
    case: Case,
    backend: Backend,
    report: Callable[[Found], Any],
    *,
    copies: int | None = None,
    checks: int | None = None,
    seconds: float = 4.0,
) -> None:
    """Check a case, then time what is right: reports by the clock, then by the GPU's own clock.

    Args:
      case: of any kind.
      backend: whose kernel it is.
      report: takes what was found.
      copies: of weights; None: as many as are larger than a GPU's cache.
      checks: of what else a row stands for, at most; None for all.
      seconds: to spend on timing by the clock.
    """
    compared = subject(case, backend, copies or copies_beyond_cache(copy_bits(case)))
    ways, chains = compared.ways, {name: way.chain() for name, way in compared.ways.items()}
    runs = {
        name: functools.partial(chain, ways[name].x, ways[name].copies)
        for name, chain in chains.items()
    }
    run = runs[KERNEL]
    # So that memory which nobody writes is likely to show.
    like = jax.eval_shape(run)
    nonsense = jax.tree.map(lambda own: jnp.full(own.shape, jnp.nan, own.dtype), like)
    jax.block_until_ready(nonsense)
    del nonsense
    outs = jax.block_until_ready(run())
    error = compared.error(outs)
    for _ in range(_REPEATS):
        if error <= 1 and not same_bits(outs, run()):
            # Sums are added in a fixed order: a race shows as other bits.
            error = math.inf
    del outs
    for check in compared.elsewhere[:checks]:
        if error <= 1:
            error = max(error, check())
    kernel = backend.kernel(case.call, current_target(1))
    # Infinity is no number in JSON.
    found: Found = {"error": min(error, sys.float_info.max), "kernel": kernel}
    found["plain"] = compared.plain
    if not error <= 1:
        report(found)
        return
    samples = microseconds(runs, seconds, len(ways[KERNEL].copies))
    medians = {name: statistics.median(own) for name, own in samples.items()}
    report(found | {"microseconds": medians, "clock": "wall"} | speeds(samples))
    on_gpu = {name: on_device(chain, ways[name]) for name, chain in chains.items()}
    if all(on_gpu.values()):
        over = speeds({name: [own] for name, own in on_gpu.items() if own})
        report(found | {"microseconds": on_gpu, "clock": "device"} | over)


def speeds(samples: Mapping[str, Sequence[float]]) -> Found:
    """Time of each other way over the kernel's: within each round, then the median."""
    ways = {"over_plain": PLAIN, "over_unpacking": UNPACKING, "over_bfloat16": BFLOAT16}
    found: Found = dict.fromkeys(ways)
    for field, way in ways.items():
        if way in samples:
            pairs = zip(samples[way], samples[KERNEL], strict=True)
            found[field] = statistics.median(other / own for other, own in pairs)
    return found


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


# What is compared -------------------------------------------------------------------------------


def subject(case: Case, backend: Backend, copies: int) -> Subject:
    """What a case measures.

    Args:
      case: of any kind.
      backend: whose kernel it is.
      copies: of weights, or of gradients whose rows are summed.
    """
    x, weights, dense_x, dense = _operands(case, copies)
    call, unpacked = case.call, dataclasses.replace(case, packed=False).call
    kernels = _given(weights, backend, case)

    def way(run: Callable[..., Any], call: Call, copies: list[Any], take: Any = lambda w: w) -> Way:
        def one(x: Any, w: Any) -> jax.Array:
            return run(x[0], take(w), *x[1:], call)

        return Way(one=one, x=x, copies=copies)

    ways = {
        KERNEL: way(_kernel_of(backend, call), call, kernels),
        BFLOAT16: Way(one=functools.partial(_in_bfloat16, case), x=dense_x, copies=dense),
    }
    plain_call, laid_out = unpacked, weights
    if case.packed:
        run = _plain_path(unpacked).offer.run
        ways[UNPACKING] = way(run, unpacked, kernels, lambda w: w.unpack())
        # Without the kernel `pack_weights` lays out for the plain path, where that has a layout.
        packing = _plain_path(case.packing)
        laid_out = _packed(weights, packing.offer.run, case)
        if isinstance(laid_out[0], PackedMXArray):
            rhs = dataclasses.replace(unpacked.rhs, packed_by=packing.backend.name)
            plain_call = dataclasses.replace(unpacked, rhs=rhs)
    plain = _plain_path(plain_call)
    if plain.backend != backend:
        ways[PLAIN] = way(plain.offer.run, plain_call, laid_out)
    product_error = functools.partial(_product_error, call=unpacked, bound=backend.epsilon_bound)

    def error(outs: list[Any]) -> float:
        return max(float(product_error(out, x, w)) for out, w in zip(outs, weights, strict=True))

    checks = [
        functools.partial(_error_elsewhere, other, backend, sizes)
        for other, sizes in _elsewhere(case)
        if takes(backend, other, current_target(1))
    ]
    return Subject(ways=ways, error=error, elsewhere=checks, plain=plain.backend.name)


def _kernel_of(backend: Backend, call: Call) -> Callable[..., Any]:
    """A backend's own way, whatever selection would say."""
    target = current_target(1)
    reason = backend.rejects(call, target)
    if reason is not None:
        raise ValueError(f"gpu: {backend.name} does not take this on {target}: {reason}")
    return backend.offers[type(call)].run


def _plain_path(call: Call) -> Choice:
    """What computes a call without any row."""
    with evidence.use(()):
        return select(call, current_target(1))


def _operands(
    case: Case, copies: int, sizes: jax.Array | None = None
) -> tuple[tuple[Any, ...], list[MXArray], tuple[Any, ...], list[jax.Array]]:
    """What every copy meets, and the copies; then both in bfloat16, for XLA's own product.

    The first is the rows and, where they are in groups, the sizes of those; copies are of quantized
    weights, or of gradients where rows are summed.
    """
    m, n, k = case.shape
    sums, dtype = case.kind == "ragged sums", jnp.dtype(case.dtype)
    lhs, rhs = (None if name is None else block_format(name) for name in case.formats)
    assert rhs is not None
    k_first = case.k_first or case.groups > 0
    shape = (m, n) if sums else (k, n) if k_first else (n, k)
    shape = (case.groups, *shape) if case.groups and not sums else shape
    sizes = uneven(case) if sizes is None else sizes
    rows = jax.random.normal(jax.random.key(1), (m, k), dtype)
    draw = jax.jit(lambda key: jax.random.normal(key, shape, dtype))
    dense = [draw(key) for key in jax.random.split(jax.random.key(0), copies)]
    x, taken = rows, sizes
    cast = jax.jit(lambda w: quantize(w, rhs, axis=-2 if k_first else -1))
    if sums:
        # Along the rows, in a layout whose groups begin with blocks, as a training step casts.
        layout = ragged_rows(sizes, m, case.unit)
        cast = jax.jit(lambda x: quantize(layout.place(x), rhs, axis=-2))
        x, taken = cast(rows), layout.sizes
    elif lhs is not None:
        x = jax.jit(lambda x: quantize(x, lhs))(rows)
    dense_x, in_bfloat16 = rows.astype(jnp.bfloat16), [w.astype(jnp.bfloat16) for w in dense]
    if case.groups:
        return (x, taken), [cast(w) for w in dense], (dense_x, sizes), in_bfloat16
    return (x,), [cast(w) for w in dense], (dense_x,), in_bfloat16


def uneven(case: Case) -> jax.Array:
    """Rows of each group, int32 `[g]`: some have most, some have none, and some rows no group."""
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.full(max(case.groups, 1), 0.5))
    return jnp.asarray(rng.multinomial(case.shape[0] - case.shape[0] // 16, shares), jnp.int32)


def _packed(weights: list[MXArray], pack: Callable[..., Any], case: Case) -> list[Any]:
    lay_out = jax.jit(lambda w: pack(w, case.packing))
    return [lay_out(w) for w in weights]


def _given(weights: list[MXArray], backend: Backend, case: Case) -> list[Any]:
    """Weights as the kernel reads them."""
    return _packed(weights, _kernel_of(backend, case.packing), case) if case.packed else weights


def _in_bfloat16(case: Case, x: tuple[Any, ...], w: jax.Array) -> jax.Array:
    """The product by XLA."""
    if case.kind == "ragged sums":
        return grouped_dot(x[0], w, x[1], (-2, -2), None, jnp.bfloat16)
    if case.groups:
        return lax.ragged_dot(x[0], w, x[1], preferred_element_type=jnp.bfloat16)
    numbers = (((1,), (1,)), ((), ()))
    return lax.dot_general(x[0], w, numbers, preferred_element_type=jnp.bfloat16)


# Numbers ------------------------------------------------------------------------------------------


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
    (x, weights, *_), call = _operands(case, 1, sizes), case.call
    (w,), run = _given(weights, backend, case), _kernel_of(backend, call)
    out = jax.jit(lambda x, w: run(x[0], w, *x[1:], call))(x, w)
    unpacked = dataclasses.replace(case, packed=False).call
    return float(_product_error(out, x, weights[0], call=unpacked, bound=backend.epsilon_bound))


@functools.partial(jax.jit, static_argnames=("call", "bound"))
def _product_error(
    out: jax.Array, x: Any, w: MXArray, *, call: MatmulCall | RaggedCall, bound: float
) -> jax.Array:
    """The largest error over what a backend's bound, and one rounding to the dtype, allow."""

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


# Time: chains under one jit, in rounds, by the clock and by the GPU's own -------------------------


def copies_beyond_cache(bits: float) -> int:
    """How many copies of so many bits no GPU's cache holds together, within reason."""
    return min(_MAX_COPIES, max(2, math.ceil(_BEYOND_CACHE * 8 / bits)))


def microseconds(
    runs: Mapping[str, Callable[[], Any]], seconds: float, count: int
) -> dict[str, list[float]]:
    """Microseconds of one of `count` products in a run, by the clock.

    Rounds: each runs everything, in an order drawn anew; so a clock that falls slows all.

    Args:
      runs: by name; what a run returns is waited for.
      seconds: to spend.
      count: products in a run.
    """
    repeats = {}
    for name, run in runs.items():
        _seconds(run, 1)  # compiles
        repeats[name] = max(1, round(_SAMPLE / max(_seconds(run, 1), 1e-9)))
    samples: dict[str, list[float]] = {name: [] for name in runs}
    order, draw = list(runs), random.Random(0)
    started = time.perf_counter()
    for done in range(_MAX_ROUNDS):
        if done >= _ROUNDS and time.perf_counter() - started > seconds:
            break
        draw.shuffle(order)
        for name in order:
            took = _seconds(runs[name], repeats[name])
            samples[name].append(1e6 * took / repeats[name] / count)
    return samples


def _seconds(run: Callable[[], Any], repeats: int) -> float:
    """Of runs that are started one after the other, until the last is done."""
    result = None
    started = time.perf_counter()
    for _ in range(repeats):
        result = run()
    jax.block_until_ready(result)
    return time.perf_counter() - started


def on_device(chain: Callable[..., Any], way: Way) -> float | None:
    """Median microseconds of one copy by the GPU's own clock (CUPTI); None without it."""
    if jax.devices()[0].platform != "gpu":
        return None
    try:
        from jax.experimental.mosaic.gpu import profiler

        measured: Any = profiler.measure(chain)
        found = [measured(way.x, way.copies)[1] for _ in range(_ROUNDS)]
    except Exception:
        # Not by this version of JAX, no CUPTI here, or another tool holds it.
        return None
    if any(one is None for one in found):
        return None
    return 1e3 * statistics.median(found) / len(way.copies)
