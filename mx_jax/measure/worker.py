"""The process of one case: it checks what a kernel gives, times it, and reports lines of JSON.

The last line counts. The first has what the clock says: what comes after may still fail, since not
every machine has the GPU's own clock in order.
"""

import dataclasses
import functools
import json
import math
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.backends import evidence
from mx_jax.backends.calls import Call, MatmulCall, QuantizeBothCall, QuantizeCall, RaggedCall
from mx_jax.backends.reference import REFERENCE
from mx_jax.backends.select import Choice, current_target, known_backends, select
from mx_jax.backends.target import Backend
from mx_jax.formats import block_format
from mx_jax.measure.cases import Case, copy_bits, takes
from mx_jax.measure.timing import (
    Way,
    copies_beyond_cache,
    median_seconds,
    microseconds,
    on_device,
    ratios,
)
from mx_jax.mxarray import MXArray
from mx_jax.ops.dot_general import matmul
from mx_jax.ops.packing import pack_weights
from mx_jax.ops.quantize import quantize
from mx_jax.packed import PackedMXArray
from mx_jax.recipes.named import high_precision, mxfp8, weight_only
from mx_jax.reference.matmul import scaled_matmul
from mx_jax.reference.ragged import grouped_dot, ragged_rows, scaled_ragged_dot
from mx_jax.reference.scale_rules import SCALE_RULES, ScaleRule
from mx_jax.testing.draw import draw_any_bits, with_signs

KERNEL, PLAIN, UNPACKING, BFLOAT16 = "kernel", "plain path", "unpacking first", "bfloat16"
_REPEATS = 5

# A function of x and all copies that computes all products or casts; and what is reported.
Chain = Callable[[Any, Any], list[Any]]
Found = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is done of everything.

    Attributes:
      copies: of weights, or of what is cast; None: as many as are larger than a GPU's cache.
      checks: of what else a row stands for, at most; None for all.
      seconds: to spend on timing.
    """

    copies: int | None = None
    checks: int | None = None
    seconds: float = 4.0


THOROUGH = Effort()
# Whether it runs at all, is right and how fast: nothing that a row could rest on.
TOUCH = Effort(checks=0, seconds=0.5)


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


def _print(line: str) -> None:
    # At once: a process that ends by a signal writes nothing more.
    print(line, flush=True)


def answer(
    text: str,
    write: Callable[[str], None] = _print,
    *,
    touch: bool = False,
) -> int:
    """Measure the case that a JSON text describes, in lines of JSON; returns the exit status.

    `"machine"` asks what machine this is, a name in `STEPS` for that step. What fails after
    something was found goes to stderr.
    """
    reported: list[Found] = []

    def report(found: Found) -> None:
        reported.append(found)
        write(json.dumps(found))

    facts = json.loads(text)
    try:
        if facts == "machine":
            target = current_target(1)
            names = "platform", "compute_capability", "device_kind"
            report({name: getattr(target, name) for name in names})
        elif isinstance(facts, str):
            # With the rows that count here, as a program has them.
            report(STEPS[facts]())
        else:
            with evidence.use(()):
                case = Case.from_json(facts)
                measure(case, _backend(case), report, TOUCH if touch else THOROUGH)
    except Exception as error:
        if reported:
            traceback.print_exc()
            return 1
        last = "".join(traceback.format_exception_only(error)).strip()
        report({"failed": last[:500], "traceback": traceback.format_exc()})
    return 0


def _backend(case: Case) -> Backend:
    found = next((own for own in known_backends() if own.name == case.backend), None)
    if found is None:
        raise ValueError(f"gpu: knows no backend of this name, got backend={case.backend!r}")
    return found


def measure(
    case: Case, backend: Backend, report: Callable[[Found], Any], effort: Effort = THOROUGH
) -> None:
    """Check a case, then time what is right.

    Reports by the clock, and then by the GPU's own clock.
    """
    compared = subject(case, backend, effort.copies or copies_beyond_cache(copy_bits(case)))
    chains = {name: way.chain() for name, way in compared.ways.items()}
    error = _error(compared, chains[KERNEL], effort)
    kernel = backend.kernel(case.call, current_target(1))
    # Infinity is no number in JSON.
    found: Found = {"error": min(error, sys.float_info.max), "kernel": kernel}
    found["plain"] = compared.plain
    if not error <= 1:
        report(found)
        return
    found |= _by_the_clock(compared, chains, effort)
    report(dict(found))
    on_gpu = {name: on_device(chain, compared.ways[name]) for name, chain in chains.items()}
    if all(on_gpu.values()):
        times = {name: [own] for name, own in on_gpu.items() if own}
        found |= {"microseconds": on_gpu, "clock": "device"}
        report(found | _speeds(ratios(times, KERNEL)))


def _by_the_clock(compared: Subject, chains: Mapping[str, Chain], effort: Effort) -> Found:
    """Speeds of the kernel over each other way, and what they follow from."""
    ways = compared.ways
    runs = {
        name: functools.partial(chain, ways[name].x, ways[name].copies)
        for name, chain in chains.items()
    }
    samples = microseconds(runs, effort.seconds, len(ways[KERNEL].copies))
    medians = {name: statistics.median(own) for name, own in samples.items()}
    return _speeds(ratios(samples, KERNEL)) | {"microseconds": medians, "clock": "wall"}


def _speeds(over: Mapping[str, float]) -> Found:
    names = {"over_plain": PLAIN, "over_unpacking": UNPACKING, "over_bfloat16": BFLOAT16}
    return {field: over.get(name) for field, name in names.items()}


def _error(compared: Subject, chain: Chain, effort: Effort) -> float:
    """The largest error of what is timed, and of what else its row stands for."""
    way = compared.ways[KERNEL]
    # So that memory which nobody writes is likely to show.
    nonsense = jax.tree.map(_nonsense, jax.eval_shape(chain, way.x, way.copies))
    del nonsense
    outs = jax.block_until_ready(chain(way.x, way.copies))
    error = compared.error(outs)
    for _ in range(_REPEATS):
        if error <= 1 and not same_bits(outs, chain(way.x, way.copies)):
            # Sums are added in a fixed order: a race shows as other bits.
            return math.inf
    del outs
    for check in compared.elsewhere[: effort.checks]:
        if error <= 1:
            error = max(error, check())
    return error


def _nonsense(like: jax.ShapeDtypeStruct) -> jax.Array:
    inexact = jnp.issubdtype(like.dtype, jnp.inexact)
    value = jnp.nan if inexact else jnp.iinfo(like.dtype).max
    return jax.block_until_ready(jnp.full(like.shape, value, like.dtype))


# What is compared -------------------------------------------------------------------------------


def subject(case: Case, backend: Backend, copies: int) -> Subject:
    """What a case measures.

    Args:
      case: of any kind.
      backend: whose kernel it is.
      copies: of weights, of gradients whose rows are summed, or of what is cast.
    """
    return (_cast_subject if case.axes else _product_subject)(case, backend, copies)


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
    case: Case, copies: int, sizes: Any = None
) -> tuple[tuple[Any, ...], list[MXArray], tuple[Any, ...], list[jax.Array]]:
    """What every copy meets: rows and, where they are in groups, the sizes of those; quantized
    weights, or gradients where rows are summed; and both for XLA's own product in bfloat16."""
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
    weights = [cast(w) for w in dense]
    in_bfloat16 = rows.astype(jnp.bfloat16), [w.astype(jnp.bfloat16) for w in dense]
    if not case.groups:
        return (x,), weights, in_bfloat16[:1], in_bfloat16[1]
    return (x, taken), weights, (in_bfloat16[0], sizes), in_bfloat16[1]


def _packed(weights: list[MXArray], pack: Callable[..., Any], case: Case) -> list[Any]:
    lay_out = jax.jit(lambda w: pack(w, case.packing))
    return [lay_out(w) for w in weights]


def _given(weights: list[MXArray], backend: Backend, case: Case) -> list[Any]:
    """Weights as the kernel reads them."""
    return _packed(weights, _kernel_of(backend, case.packing), case) if case.packed else weights


def uneven(case: Case) -> jax.Array:
    """Rows of each group, int32 `[g]`: some have most, some have none, and some rows no group."""
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.full(max(case.groups, 1), 0.5))
    return jnp.asarray(rng.multinomial(case.shape[0] - case.shape[0] // 16, shares), jnp.int32)


def _product_subject(case: Case, backend: Backend, copies: int) -> Subject:
    x, weights, dense_x, dense = _operands(case, copies)
    call, unpacked = case.call, dataclasses.replace(case, packed=False).call
    assert isinstance(unpacked, MatmulCall | RaggedCall), unpacked
    given = _given(weights, backend, case)

    def way(run: Callable[..., Any], call: Call, copies: list[Any], take: Any = lambda w: w) -> Way:
        def one(x: Any, w: Any) -> jax.Array:
            return run(x[0], take(w), *x[1:], call)

        return Way(one=one, x=x, copies=copies)

    in_bfloat16 = functools.partial(_in_bfloat16, case)
    ways = {
        KERNEL: way(_kernel_of(backend, call), call, given),
        BFLOAT16: Way(one=in_bfloat16, x=dense_x, copies=dense),
    }
    plain_call, laid_out = unpacked, weights
    if case.packed:
        run = _plain_path(unpacked).offer.run
        ways[UNPACKING] = way(run, unpacked, given, lambda w: w.unpack())
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
        pairs = zip(outs, weights, strict=True)
        return max(_product_error(out, x, w, unpacked, backend) for out, w in pairs)

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
    (x, weights, *_), call = _operands(case, 1, sizes), case.call
    (given,), run = _given(weights, backend, case), _kernel_of(backend, call)
    out = jax.jit(lambda x, w: run(x[0], w, *x[1:], call))(x, given)
    unpacked = dataclasses.replace(case, packed=False).call
    return _product_error(out, x, weights[0], unpacked, backend)


def _product_error(out: jax.Array, x: Any, w: MXArray, call: Call, backend: Backend) -> float:
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
    call = case.call
    assert isinstance(call, AnyCast)
    draw = jax.jit(lambda key: jax.random.normal(key, case.shape, jnp.dtype(case.dtype)))
    arrays = [draw(key) for key in jax.random.split(jax.random.key(0), copies)]
    run, plain = _cast_by(backend, call), _plain_cast(call)
    # A copy; not x + 0, which XLA knows to be x.
    ones = {KERNEL: lambda _, x: run(x), BFLOAT16: lambda _, x: -x}
    if backend != REFERENCE:
        ones[PLAIN] = lambda _, x: plain(x)
    once = jax.jit(plain)

    def error(outs: list[Any]) -> float:
        alike = all(same_bits(out, once(x)) for out, x in zip(outs, arrays, strict=True))
        return 0.0 if alike else math.inf

    return Subject(
        ways={name: Way(one=one, x=jnp.int32(0), copies=arrays) for name, one in ones.items()},
        error=error,
        # A row says nothing of rules for scales: so all that the kernel computes are checked.
        elsewhere=[
            functools.partial(_any_bits, other, backend)
            for other in (_with_rule(call, rule) for rule in SCALE_RULES)
            if other is not None and backend.rejects(other, current_target(1)) is None
        ],
    )


def _cast_by(backend: Backend, call: AnyCast) -> Callable[[jax.Array], Any]:
    run, bits = (
        _kernel_of(backend, call),
        (None, None) if isinstance(call, QuantizeBothCall) else None,
    )
    return lambda x: run(x, bits, None, call)


def _plain_cast(call: AnyCast) -> Callable[[jax.Array], Any]:
    """By the reference's code, one cast after the other."""
    if isinstance(call, QuantizeCall):
        return _cast_by(REFERENCE, call)
    runs = _plain_cast(call.first), _plain_cast(call.second)
    return lambda x: tuple(run(x) for run in runs)


def _with_rule(call: Any, rule: ScaleRule) -> Any:
    """A cast by another rule, or None if that is not for its scales."""
    if isinstance(call, QuantizeCall):
        fits = call.format.scale.kind in rule.kinds
        return dataclasses.replace(call, shape=_SHAPE, scale_rule=rule) if fits else None
    first, second = _with_rule(call.first, rule), _with_rule(call.second, rule)
    return first and second and dataclasses.replace(call, first=first, second=second)


def _any_bits(call: AnyCast, backend: Backend) -> float:
    """0 if a cast of random bits, NaN, Inf and subnormals among them, is right, else infinity.

    One NaN would be all that a scale of the whole tensor sees: there numbers of many octaves.
    """
    single = call.first if isinstance(call, QuantizeBothCall) else call
    rng, dtype = np.random.default_rng(0), single.dtype
    if single.format.tensor_scale:
        drawn = with_signs(rng, 2.0 ** rng.uniform(-30, 10, _SHAPE)).astype(dtype)
    else:
        drawn = draw_any_bits(rng, _SHAPE, dtype)
    x = jnp.asarray(drawn)
    outs = (jax.jit(run)(x) for run in (_cast_by(backend, call), _plain_cast(call)))
    return 0.0 if same_bits(*outs) else math.inf


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


# Steps --------------------------------------------------------------------------------------------


def training(tokens: int = 4096, features: int = 4096, units: int = 14336) -> Found:
    """A Dense layer: output, both gradients, and a step down the kernel's."""
    w, x, g = (
        jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
        for i, shape in enumerate(((features, units), (tokens, features), (tokens, units)))
    )

    def by(recipe: Any) -> Callable[[], Any]:
        def step(w: jax.Array, x: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
            y, pullback = jax.vjp(functools.partial(matmul, recipe=recipe), x, w)
            dx, dw = pullback(g)
            return y, dx, w - jnp.bfloat16(1e-3) * dw

        return functools.partial(jax.jit(step), w, x, g)

    what = f"training step of Dense {features} to {units}, {tokens} tokens, mxfp8"
    return _beside_bfloat16(what, tokens, by(mxfp8()), by(high_precision()))


def decoding(layers: int = 12, features: int = 8192) -> Found:
    """One token through Dense layers, whose weights are packed as a model's are."""
    scale = features**-0.5
    draw = jax.jit(lambda key: scale * jax.random.normal(key, (features, features), jnp.bfloat16))
    dense = [draw(key) for key in jax.random.split(jax.random.key(0), layers)]
    cast = jax.jit(lambda w: quantize(w, "mxfp4", axis=0))
    packed = [pack_weights(cast(w)) for w in dense]
    x = jnp.ones((1, features), jnp.bfloat16)

    def by(multiply: Callable[..., Any], weights: list[Any]) -> Callable[[], Any]:
        run = jax.jit(lambda x, weights: functools.reduce(multiply, weights, x))
        return functools.partial(run, x, weights)

    what = f"decoding step through {layers} Dense layers of {features} x {features}, mxfp4"
    quantized = functools.partial(matmul, recipe=weight_only("mxfp4"))
    return _beside_bfloat16(what, 1, by(quantized, packed), by(jnp.matmul, dense))


def _beside_bfloat16(
    what: str, tokens: int, ours: Callable[[], Any], bfloat16: Callable[[], Any]
) -> Found:
    """Tokens a second of a step, here and in bfloat16."""
    seconds = median_seconds({"tokens_a_second": ours, "in_bfloat16": bfloat16})
    return {"step": what} | {name: tokens / took for name, took in seconds.items()}


# A training step and a decoding step of Dense layers, which end the command.
STEPS: dict[str, Callable[[], Found]] = {"training": training, "decoding": decoding}
