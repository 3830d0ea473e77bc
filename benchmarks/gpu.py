"""The GPU kernels on a GPU, beside other libraries and the goals that they are to reach.

Each is timed beside plain JAX and bfloat16 and, where PyTorch and Triton are installed, the same
product there (`benchmarks.gpu_peers`); then it is said how near all are to the machine's limits,
and which of the project's goals (`benchmarks.gpu_goals`) are met: of products and a
training step of a decoder's block. Last come rows for `mx_jax/backends/measured.py`, of the
products by weights that a kernel computes faster than XLA: by them it runs by default.

How time is measured: `benchmarks.gpu_compare`. Beside each product's ratio stands its upper bound:
bytes over the memory's bandwidth, or operations over the tensor cores' peak, whichever takes
longer.

Before it is timed, a kernel's first product must be within its bound of the reference's, and have
the same bits again. What fails is written down with its
traceback, and the rest goes on.
"""

import argparse
import datetime
import functools
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

# PyTorch shares the GPU's memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

from benchmarks import environment, gpu_peers, report
from benchmarks.gpu_compare import (
    PLAIN,
    Comparison,
    Maker,
    Measured,
    Repeated,
    chain_of,
    compare,
)
from benchmarks.gpu_goals import GOALS, LARGE, Verdict, What, sheet, verdicts
from benchmarks.gpu_products import (
    BASELINE,
    KERNEL,
    Pair,
    Timed,
    Way,
    error,
    products,
    speed_bound,
)
from benchmarks.gpu_steps import Step, compare_steps
from benchmarks.timing import Case
from mx_jax.backends.pallas_gpu.tiles import rejects_machine
from mx_jax.backends.select import current_target
from mx_jax.backends.target import Target
from mx_jax.formats import MX_FORMATS, MXFP4, MXFP8_E4M3, NVFP4

FORMATS = {format.name: format for format in (*MX_FORMATS, NVFP4)}
# How often a kernel's first product must have the same bits: a race would show as others.
_REPEATS = 5

PARTS: Mapping[str, type] = {"products": Timed, "steps": Step}
# Rows of activations that products are timed for, beside those of goals.
ROWS = (1, 16, 64, 256, 4096)
# Timed by default.
PAIRS = (
    Pair(rhs=MXFP4),
    Pair(rhs=MXFP8_E4M3),
    Pair(lhs=MXFP8_E4M3, rhs=MXFP8_E4M3),
    Pair(rhs=NVFP4),
)
# (n, k) of weights, beside those of goals: square, and of a model's feed-forward layer.
SIZES = (LARGE, (4096, 11008))


def wanted(options: argparse.Namespace, device: str) -> list[What]:
    """Everything to measure, once: of each kind this device's goals first, kinds by turns.

    So a run that ends early has something of every kind.

    Args:
      options: the command's.
      device: its name.
    """
    goals = [goal.what for goal in GOALS if goal.is_for(device)]
    products = _products(options)
    subjects = [*goals, *products]
    if options.pairs or options.rows or options.sizes:
        subjects = [*products, *(what for what in goals if not isinstance(what, Timed))]
    parts = [
        [what for what in dict.fromkeys(subjects) if isinstance(what, kind)]
        for part, kind in PARTS.items()
        if part in options.parts
    ]
    rounds = itertools.zip_longest(*parts)
    return [what for turn in rounds for what in turn if what is not None]


def _products(options: argparse.Namespace) -> list[Timed]:
    """Products that options name, or else the usual ones."""
    pairs, sizes = options.pairs or PAIRS, options.sizes or SIZES
    return [
        Timed(pair=pair, m=m, n=n, k=k)
        for pair, (n, k), m in itertools.product(pairs, sizes, options.rows or ROWS)
    ]


def measure_all(
    subjects: Sequence[What],
    options: argparse.Namespace,
    device: str,
    target: Target,
    deadline: float,
) -> Iterator[Measured]:
    """Measures them in this order, as many as there is time for."""
    makers = ProductMakers(options, target)
    with report.progress(len(subjects)) as step:
        for what in subjects:
            step(str(what))
            if time.monotonic() > deadline:
                continue
            yield compare(comparison(what, makers, options, device), options.seconds)


def comparison(
    what: What, products: "ProductMakers", options: argparse.Namespace, device: str
) -> Comparison:
    """How a thing is measured.

    Args:
      what: is measured.
      products: makes their cases.
      options: the command's.
      device: its name.
    """
    if isinstance(what, Step):
        return compare_steps(what, options.calls)
    copies = what.copies if options.copies is None else options.copies
    return Comparison(
        what=what,
        makers=products(what, copies),
        baseline=BASELINE,
        count=copies * options.calls,
        bound=speed_bound(device, what),
    )


class ProductMakers:
    """Makes the cases of products; keeps weights for the next product of the same ones."""

    def __init__(self, options: argparse.Namespace, target: Target):
        self._options, self._target = options, target
        self._of: Any = None
        self._weights: dict[str, list[Any]] = {}

    def __call__(self, what: Timed, copies: int) -> list[Maker]:
        pair, n, k = what.pair, what.n, what.k
        if self._of != (pair, n, k):
            self._of, self._weights = (pair, n, k), {}
        weights = self._weights
        known = products(pair, n, k, self._target)
        draw = functools.cache(
            lambda: jax.random.normal(jax.random.key(1), (what.m, k), jnp.bfloat16)
        )

        def maker(name: str) -> Callable[[], Case]:
            def make() -> Case:
                for key in (name, BASELINE):
                    if key not in weights:
                        weights[key] = known[key].weights(n, k, copies)
                x = draw()
                if name != BASELINE:
                    _check(name, pair, known[name], x, weights[name][0], weights[BASELINE][0])
                way = Repeated(one=known[name].product, x=x, copies=weights[name])
                return chain_of(name, way, self._options.calls)

            return make

        return [
            *((name, maker(name)) for name in known),
            *gpu_peers.cases(what, copies, self._options.calls),
        ]


def _check(name: str, pair: Pair, way: Way, x: jax.Array, laid_out: Any, w: jax.Array) -> None:
    """Raises ArithmeticError unless a first product is right, and has the same bits each time.

    Args:
      name: of the way.
      pair: of the product.
      way: to multiply x by `laid_out`.
      x: the activations.
      laid_out: the weights, as the way reads them.
      w: the same in bfloat16.
    """
    product = jax.jit(way.product)
    out = product(x, laid_out)
    error_share = float(error(pair, out, x, w))
    if not error_share <= 1:
        raise ArithmeticError(f"{name} is wrong: error={error_share:.3g} of what is allowed")
    if not all(bool(jnp.all(product(x, laid_out) == out)) for _ in range(_REPEATS)):
        raise ArithmeticError(f"{name} is wrong: the same product has other bits each time")


def rows(measured: Sequence[Measured], device: str) -> list[str]:
    """Lines for `mx_jax/backends/measured.py`: products that a kernel computes faster than XLA."""
    lines = []
    for measurement in measured:
        what, clocks = measurement.what, (measurement.device_microseconds, measurement.microseconds)
        times = next((c for c in clocks if {KERNEL, PLAIN} <= c.keys()), None)
        if not isinstance(what, Timed) or what.pair.lhs is not None or times is None:
            continue
        if (ratio := times[PLAIN] / times[KERNEL]) > 1:
            # The next power of four.
            elements = f"2**{2 * math.ceil((what.n * what.k - 1).bit_length() / 2)}"
            version = "{}.{}".format(*jax.__version_info__)
            facts = (f'"{KERNEL}", "{device}", "{version}"', what.pair.rhs.name.upper(), elements)
            date = datetime.date.today().isoformat()
            row = f'Row({", ".join(facts)}, {ratio:.2g}, "{date}"),'
            lines.append(f"{row}  # {what.m} rows")
    return lines


def sheets(measured: Sequence[Measured], judged: Sequence[Verdict]) -> list[report.Sheet]:
    """Goals, times and speeds."""
    times = report.Sheet("Microseconds", ("", "way", "wall clock", "GPU's clock"))
    speeds = report.Sheet(
        "Speed over the baseline's",
        ("", "way", "wall clock", "GPU's clock", "bound"),
    )
    for measurement in measured:
        for way, microseconds in measurement.microseconds.items():
            device = report.number(measurement.device_microseconds.get(way), 1)
            times.rows.append([str(measurement.what), way, report.number(microseconds, 1), device])
            if way == measurement.baseline or way not in measurement.speed:
                continue
            values = (
                measurement.speed[way].median,
                measurement.device_speed.get(way),
                measurement.bound,
            )
            numbers = (report.number(value, 2) for value in values)
            speeds.rows.append([str(measurement.what), way, *numbers])
    times.notes = [
        f"{measurement.what}: {way} failed: {report.last_line(why)}"
        for measurement in measured
        for way, why in measurement.failed.items()
    ]
    return [sheet(judged), times, speeds]


def as_json(
    known: dict[str, Any], measured: Sequence[Measured], judged: Sequence[Verdict]
) -> dict[str, Any]:
    """The result, for programs."""
    return {
        "environment": known,
        "goals": [entry.as_json() for entry in judged],
        "rows": [entry.as_json() for entry in measured],
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = report.parser("gpu", __doc__, out=f"gpu/{report.DEVICE}.json")
    parser.add_argument(
        "--pairs",
        nargs="+",
        type=_pair,
        default=None,
        metavar="[LHS,]RHS",
        help="formats of both sides; without LHS x stays in bfloat16 (default: four pairs)",
    )
    parser.add_argument("--rows", nargs="+", type=int, default=None, help=f"default: {ROWS}")
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=report.shape,
        default=None,
        metavar="NxK",
        help="of weights; with --pairs or --rows these products alone are timed (default: those of "
        "the goals, 8192x8192 and 4096x11008)",
    )
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument(
        "--copies",
        type=int,
        default=None,
        help="of weights (default: beyond any cache)",
    )
    parser.add_argument("--calls", type=int, default=10, help="of all copies, in one sample")
    parser.add_argument("--seconds", type=float, default=4.0, help="budget of a comparison")
    parser.add_argument(
        "--minutes", type=float, default=8.5, help="after which nothing more is begun"
    )
    return parser.parse_args(arguments)


def _pair(text: str) -> Pair:
    """`"mxfp4"` or `"mxfp8_e4m3,mxfp4"`; an argparse type."""
    try:
        *lhs, rhs = (FORMATS[name] for name in text.split(","))
        return Pair(lhs=lhs[0] if lhs else None, rhs=rhs)
    except KeyError:
        known = ", ".join(FORMATS)
        raise argparse.ArgumentTypeError(f"needs [LHS,]RHS of {known}; got {text!r}") from None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse(arguments)
    deadline = time.monotonic() + 60 * options.minutes
    target = current_target()
    reason = rejects_machine(target)
    if reason is not None:
        report.show(
            [sheet([Verdict(goal=goal, why="no GPU that a kernel runs on") for goal in GOALS])]
        )
        raise SystemExit(f"benchmarks.gpu: needs a GPU that a kernel runs on: it {reason}")
    device = jax.devices()[0].device_kind
    known = environment.describe(["torch", "triton"]) | {"gpu": device}
    options.out = report.of_device(options.out, device.lower().replace(" ", "-"))
    subjects = wanted(options, device)
    measured: list[Measured] = []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    # Written after each: a case that hangs or crashes must not cost the answers before.
    for measurement in measure_all(subjects, options, device, target, deadline):
        measured.append(measurement)
        judged = list(verdicts(measured, device, subjects))
        options.out.write_text(json.dumps(as_json(known, measured, judged), indent=1) + "\n")
    judged = list(verdicts(measured, device, subjects))
    report.publish("gpu", options, as_json(known, measured, judged), sheets(measured, judged))
    print(*rows(measured, device), sep="\n")


if __name__ == "__main__":
    main()
