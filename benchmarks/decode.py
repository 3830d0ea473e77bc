"""Decoding with a language model, token by token: formats of weights, and llama.cpp beside them.

Each case is a process of its own, on one core or on two, that holds its model. Rounds run every
case once, in an order drawn anew, while the others wait. A ratio is taken within each round. With
one thread it is of CPU time, which does not count what other programs on the machine do meanwhile;
with two, of the clock. Embedding and head are in the format of the other weights everywhere
(llama.cpp's: `benchmarks/llama_quants.py --pure`). With `MX_JAX_CPU_ISA=avx2` XLA is held to it
too; llama.cpp is to be built for the same set.
"""

import argparse
import dataclasses
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import environment, held, report
from benchmarks.llama import find_model
from benchmarks.timing import Samples, add_pace, ratio

COMMAND = "decode"
OURS = {
    "float32": ("--weights", "float32"),
    "bfloat16": ("--weights", "bfloat16"),
    "MXFP4": ("--weights", "mxfp4"),
    "MXFP4, cache MXFP8": ("--weights", "mxfp4", "--cache", "mxfp8"),
    "MXFP4 x MXINT8": ("--weights", "mxfp4", "--activations", "mxint8"),
    "MXFP4 x MXFP8": ("--weights", "mxfp4", "--activations", "mxfp8"),
    "NVFP4": ("--weights", "nvfp4"),
    "MXFP8": ("--weights", "mxfp8"),
}
HERE = Path(__file__).parent
THREADS = (1, 2)


class Worker:
    """A process that holds one case.

    Attributes:
      ready: its first answer, once its model is loaded.
    """

    def __init__(self, command: Sequence[str], cores: set[int]):
        # It has the cores of the thread that starts it, from its first moment on.
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        finally:
            os.sched_setaffinity(0, allowed)
        self.ready = self._answer()

    def ask(self, line: object) -> Any:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)
        return json.loads(self._answer())

    def close(self) -> int:
        """End it; gives its status."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        return self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"decode: a case ended with status {self.close()}")
        return line


def commands(options: argparse.Namespace, threads: int) -> dict[str, list[str]]:
    """How each case is started, by name."""
    model = find_model(options.model)
    ours = [sys.executable, "-m", "benchmarks.decode_worker", str(model)]
    sizes = ["--context", str(options.context), "--stride", str(options.stride)]
    commands_by_case = {name: [*ours, *sizes, *OURS[name]] for name in options.cases}
    for path in options.llama_models:
        script = [str(HERE / "decode_llama.py"), str(path)]
        name = f"llama.cpp {path.stem.upper()}"
        commands_by_case[name] = [options.llama_python, *script, str(threads), str(options.context)]
    return commands_by_case


def measure(options: argparse.Namespace, threads: int, step: Any) -> list[dict[str, Any]]:
    """A row a case."""
    cores = set(sorted(os.sched_getaffinity(0))[-threads:])
    workers: dict[str, Worker] = {}
    for name, command in commands(options, threads).items():
        step(f"{threads} threads: {name}")
        workers[name] = Worker(command, cores)
        workers[name].ask(options.tokens)
    samples = {name: Samples() for name in workers}
    order, shuffle = list(workers), random.Random(0).shuffle
    started, rounds = time.perf_counter(), 0
    while rounds < options.min_rounds or time.perf_counter() - started < options.seconds:
        if rounds == options.max_rounds:
            break
        shuffle(order)
        for name in order:
            spent = workers[name].ask(options.tokens)
            samples[name].wall.append(spent["wall"] / options.tokens)
            samples[name].cpu.append(spent["cpu"] / options.tokens)
            samples[name].faults.append(0)
        rounds += 1
    rows = []
    clock = "cpu" if threads == 1 else "wall"
    for name, worker in workers.items():
        ours = name in OURS
        row = {"case": name, "threads": threads, "timings": samples[name].summary()}
        row["bytes"] = json.loads(worker.ready)["bytes"] if ours else None
        row["parts"] = worker.ask("parts") if ours and threads == 1 else None
        for other in samples:
            if other == "float32" or other not in OURS:
                row[f"speed over {other}"] = dataclasses.asdict(
                    ratio(samples[other], samples[name], clock)
                )
        rows.append(row)
        worker.close()
    return rows


def sheets(result: dict[str, Any]) -> list[report.Sheet]:
    """A table of speed for each number of threads, and one of the parts of a step."""
    tables = []
    for threads in THREADS:
        rows = [row for row in result["rows"] if row["threads"] == threads]
        if not rows:
            continue
        others = [name for name in rows[0] if name.startswith("speed over")]
        which = "CPU time" if threads == 1 else "clock"
        columns = ["case", "tokens/s", "best", "ms a token", *others]
        title = f"{threads} {'thread' if threads == 1 else 'threads'}, by {which}"
        if isa := os.environ.get(held.ISA):
            title += f", everything held to {isa}"
        sheet = report.Sheet(title, columns)
        for row in rows:
            time = row["timings"]["cpu_ms" if threads == 1 else "wall_ms"]
            speed = (1e3 / time["median"], 1e3 / time["smallest"])
            cells = [f"{speed[0]:.1f}", f"{speed[1]:.1f}", f"{time['median']:.2f}"]
            cells += [f"{row[other]['median']:.2f}" for other in others]
            sheet.rows.append([row["case"], *cells])
        tables.append(sheet)
    timed = [row for row in result["rows"] if row["parts"]]
    if timed:
        names = sorted({part for row in timed for part in row["parts"]})
        names.sort(key=lambda part: -max(row["parts"].get(part, 0) for row in timed))
        parts = report.Sheet(
            "Where a step spends its time: ms, one thread", ["case", "MB of weights", *names]
        )
        for row in timed:
            cells = [f"{1e3 * row['parts'].get(part, 0):.2f}" for part in names]
            parts.rows.append([row["case"], f"{row['bytes'] / 1e6:.1f}", *cells])
        parts.notes = [
            "By XLA's profiler, eight steps: its clock counts what other programs on the machine "
            "do meanwhile. qkv, attention_out, gate_up, down and head are the products by weights."
        ]
        tables.append(parts)
    return tables


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = report.parser(COMMAND, __doc__, out="cpu/decode.json")
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or smollm2")
    parser.add_argument("--cases", nargs="*", choices=OURS, default=list(OURS))
    parser.add_argument("--threads", nargs="*", type=int, choices=THREADS, default=list(THREADS))
    parser.add_argument("--tokens", type=int, default=16, help="of one case in one round")
    parser.add_argument("--context", type=int, default=128, help="rows of the caches")
    parser.add_argument("--stride", type=int, default=8, help="of them in one dispatch, here")
    parser.add_argument("--llama-python", help="a Python with llama-cpp-python")
    parser.add_argument(
        "--llama-models", nargs="*", type=Path, default=[], help="GGUF files for it"
    )
    add_pace(parser, seconds=60.0, min_rounds=7)
    options = parser.parse_args(arguments)
    if options.tokens % options.stride:
        parser.error(f"--tokens {options.tokens} must be a multiple of --stride {options.stride}")
    described = environment.describe()
    total = len(options.threads) * (len(options.cases) + len(options.llama_models))
    rows = []
    with report.progress(total) as step:
        for threads in options.threads:
            rows += measure(options, threads, step)
    report.publish(
        COMMAND, options, {"environment": described, "rows": rows}, sheets({"rows": rows})
    )


if __name__ == "__main__":
    main()
