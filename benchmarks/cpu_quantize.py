"""Casts of the CPU library, beside a copy of the same bytes, the reference and other libraries.

Every case reads one array and writes another, or two: `both` quantizes along either axis, and
stands beside two single casts of ours. NVFP4 must look at everything once more, for its tensor
scale. The bound is a handler that moves as many bytes and computes nothing: it runs in the same
rounds. One thread, pinned; process CPU time; malloc keeps its pages, so that results do not lie on
fresh ones; see `benchmarks.timing`.
"""

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import cores, environment, limits, peers, report
from benchmarks.data import KINDS, draw
from benchmarks.timing import Case, Samples, add_pace, measure, pace, ratio
from mx_jax.backends.calls import DequantizeCall, QuantizeBothCall, QuantizeCall
from mx_jax.backends.cpu_ffi import CPU_FFI, casts
from mx_jax.backends.reference import REFERENCE
from mx_jax.formats import block_format
from mx_jax.testing.cases import QuantizeCase

OURS, COPY, PLAIN, TWO = "cpu_ffi", "copy", "plain JAX", "two single casts"
FORMATS = (
    ("mxfp8_e4m3", "rceil"),
    ("mxfp6_e2m3", "even"),
    ("mxfp4", "even"),
    ("mxint8", "floor"),
    ("nvfp4", "amax"),
    ("mxfp4_2d", "even"),
)
DTYPES = ("float32", "bfloat16")
OPERATIONS = (("quantize", -1), ("quantize", 0), ("both", -1), ("dequantize", -1))
# glibc keeps freed memory: a result on fresh pages would measure page faults.
KEEP_PAGES = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296"
    ":glibc.malloc.trim_threshold=4294967296:glibc.malloc.top_pad=268435456"
)


def rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every cast: what was timed, and ratios within rounds.

    Args:
      options: shape, seconds, min_rounds, peers; kinds of data, of which those that are not normal
        are for single casts of float32.
    """
    wanted = [
        (operation, name, rule, dtype, axis, data)
        for data in options.data
        for dtype in (DTYPES if data == "normal" else ("float32",))
        for name, rule in FORMATS
        for operation, axis in OPERATIONS
        if (operation in ("quantize", "dequantize") and axis == -1)
        or not (_is_square(name) or data != "normal")
    ]
    result = []
    with report.progress(len(wanted)) as step:
        for cast in wanted:
            step(" ".join(map(str, cast)))
            result.append(_row(options, *cast))
    return result


def _is_square(name: str) -> bool:
    return block_format(name).block[0] != 1


def _row(
    options: argparse.Namespace,
    operation: str,
    name: str,
    rule: str,
    dtype: str,
    axis: int,
    data: str,
) -> dict[str, Any]:
    call = QuantizeCase(
        format=block_format(name), shape=options.shape, axis=axis, scale_rule=rule, dtype=dtype
    ).call
    x = jnp.asarray(draw(data, options.shape)).astype(dtype)
    left_out: dict[str, str] = {}
    if operation == "dequantize":
        cases = _back(call, x)
    elif operation == "both":
        other = dataclasses.replace(call, blocks=((-2, call.blocks[0][1]),))
        cases = _both(QuantizeBothCall(first=call, second=other), x)
    else:
        cases = _there(call, x)
    if options.peers and axis == -1 and operation in ("quantize", "dequantize"):
        for peer in peers.PEERS:
            case = peers.make(peer, operation, name, rule, x)
            if isinstance(case, str):
                left_out[peer.name] = case
            elif case is not None:
                cases.append(case)
    samples = measure(cases, **pace(options))
    return {
        "operation": operation,
        "format": name,
        "rule": rule,
        "dtype": dtype,
        "axis": axis,
        "data": data,
        "shape": list(options.shape),
        "timings": {case: each.summary() for case, each in samples.items()},
        "share_of_copy": _share(samples),
        "times_faster_than": {
            case: vars(ratio(each, samples[OURS], "cpu"))
            for case, each in samples.items()
            if case not in (OURS, COPY)
        },
        "peers_left_out": left_out,
    }


def _share(samples: dict[str, Samples]) -> dict[str, float]:
    return vars(ratio(samples[COPY], samples[OURS], "cpu"))


def _case(name: str, function: Callable[..., Any], *arguments: Any) -> Case:
    compiled = jax.jit(function)
    return Case(name, lambda: compiled(*arguments))


def _num_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def copy_case(x: Any, out: Any) -> Case:
    """Reads all bytes of x, and writes as many as `out` has."""
    read, written = _num_bytes(x), _num_bytes(out)
    data = jnp.zeros((read,), jnp.uint8)
    return _case(COPY, limits.copy(read, written), data)


def _there(call: Any, x: jax.Array) -> list[Case]:
    def by(backend):
        return lambda x: backend.run(call, x, None, None)

    out = jax.eval_shape(by(CPU_FFI), x)
    cases = [_case(OURS, by(CPU_FFI), x), _case(PLAIN, by(REFERENCE), x)]
    return [*cases, copy_case(_read(x, call), out)]


def _read(x: jax.Array, call: QuantizeCall) -> list[jax.Array]:
    """What a cast has to read: a tensor scale is known only after a first look at everything."""
    return [x] * (1 + call.format.tensor_scale)


def _both(call: QuantizeBothCall, x: jax.Array) -> list[Case]:
    def once(x):
        return CPU_FFI.run(call, x, (None, None), None)

    def one_by_one(backend):
        return lambda x: [
            backend.run(single, x, None, None) for single in (call.first, call.second)
        ]

    assert casts.rejects_both(call) is None
    out = jax.eval_shape(once, x)
    cases = [_case(OURS, once, x), _case(TWO, one_by_one(CPU_FFI), x)]
    return [*cases, _case(PLAIN, one_by_one(REFERENCE), x), copy_case(_read(x, call.first), out)]


def _back(call: Any, x: jax.Array) -> list[Case]:
    q = jax.jit(lambda x: CPU_FFI.run(call, x, None, None))(x)
    back = DequantizeCall(
        shape=call.shape, dtype=call.dtype, format=call.format, blocks=call.blocks
    )

    def by(backend):
        return lambda q: backend.run(back, q)

    assert casts.rejects_dequantize(back) is None
    cases = [_case(OURS, by(CPU_FFI), q), _case(PLAIN, by(REFERENCE), q)]
    return [*cases, copy_case(q, jax.eval_shape(by(CPU_FFI), q))]


def sheets(result: list[dict[str, Any]]) -> list[report.Sheet]:
    """One table: time, bandwidth beside a copy's, and the speedup over each other case."""
    names = list(dict.fromkeys(name for row in result for name in row["times_faster_than"]))
    shape = result[0]["shape"]
    sheet = report.Sheet(
        title=f"Casts of {shape[0]} x {shape[1]}, one thread",
        columns=[
            "",
            "CPU time (ms)",
            "quartiles (ms)",
            "bandwidth, % of a copy",
            *(f"speedup over {name}" for name in names),
        ],
        notes=sorted(
            {
                f"Left out: {name}: {why}"
                for row in result
                for name, why in row["peers_left_out"].items()
            }
        ),
    )
    for row in result:
        ours = row["timings"][OURS]["cpu_ms"]
        where = "both axes" if row["operation"] == "both" else f"axis {row['axis']}"
        title = f"{row['operation']} {row['format']}, {row['dtype']}, {where}, {row['data']}"
        faster = row["times_faster_than"]
        sheet.rows.append(
            [
                title,
                f"{ours['median']:.2f}",
                f"{ours['q1']:.2f} to {ours['q3']:.2f}",
                f"{100 * row['share_of_copy']['median']:.0f}",
                *(f"{faster[n]['median']:.1f}" if n in faster else "-" for n in names),
            ]
        )
    return [sheet]


@contextlib.contextmanager
def kept_pages() -> Iterator[None]:
    """An environment in which new processes keep freed pages."""
    name, huge = cores.HUGE_PAGES
    cores.HUGE_PAGES = (name, KEEP_PAGES)
    try:
        yield
    finally:
        cores.HUGE_PAGES = (name, huge)


def casts_of(options: argparse.Namespace) -> dict[str, Any]:
    """Rows of casts, in this process, and the instruction set that ran them."""
    return {"isa": environment.cpu_library("cpu_quantize").isa, "rows": rows(options)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = report.parser("cpu_quantize", __doc__, out="cpu/casts.json")
    parser.add_argument("--shape", type=report.shape, default=(4096, 4096), help="of arrays")
    parser.add_argument("--data", nargs="*", choices=KINDS, default=KINDS, help="of arrays")
    add_pace(parser, seconds=2.0, min_rounds=7)
    parser.add_argument(
        "--peers", action=argparse.BooleanOptionalAction, default=True, help="measure peers too"
    )
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {"environment": environment.describe(peers.DISTRIBUTIONS)}
    with kept_pages():
        result["casts"] = cores.on_one_core(casts_of, options)
    result["load_average_at_the_end"] = round(os.getloadavg()[0], 2)
    report.publish("cpu_quantize", options, result, sheets(result["casts"]["rows"]))


if __name__ == "__main__":
    main()
