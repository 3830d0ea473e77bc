"""Starting the program on several devices: in one process, or in several that find each other.

Read before anything asks JAX for a device: then it would be too late.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import jax

from .mesh import parse_mesh

OUT = Path("train_lm_out")
# Exit status of a process that lost another one, and of the command that started them all.
LOST = 4
# Seconds that the others have to notice it themselves.
PATIENCE = 15.0
# Set for the processes that were started so.
STARTED = "TRAIN_LM_STARTED"
Worker: TypeAlias = "subprocess.Popen[bytes]"
# Seconds that a process waits in a sum for the others, by the names of XLA's flags.
FIRST_SUM = 900
TIMEOUTS = ("timeout_seconds", "call_terminate_timeout_seconds", "call_warn_stuck_timeout_seconds")


def add_options(group: argparse._ArgumentGroup) -> None:
    """The options that say where the program runs."""
    group.add_argument(
        "--mesh",
        metavar="AXIS=N,...",
        help="sizes of data, fsdp and model: batch, weights and features are sharded\n"
        "along them; on a CPU so many virtual devices are made",
    )
    group.add_argument(
        "--processes", type=int, default=1, metavar="N", help="start so many on this machine"
    )
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="instead, be one of --processes that are started one by one: where process 0 is",
    )
    group.add_argument("--process", type=int, default=0, metavar="I", help="which one this is")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Where the program runs.

    Attributes:
      mesh: sizes of the mesh's axes; None: one device, no mesh.
      processes: how many work together.
      coordinator: host and port of process 0; None: this process starts all.
      process: which one this is.
      folder: where the program writes.
    """

    mesh: dict[str, int] | None
    processes: int
    coordinator: str | None
    process: int
    folder: Path

    @classmethod
    def parse(cls, argv: Sequence[str]) -> Launch:
        """Reads its own options and leaves the others; raises ValueError if they make no sense."""
        parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
        add_options(parser.add_argument_group())
        parser.add_argument("--out", type=Path, default=OUT)
        options, _ = parser.parse_known_args(argv)
        mesh = None if options.mesh is None else parse_mesh(options.mesh)
        launch = cls(
            mesh=mesh,
            processes=options.processes,
            coordinator=options.coordinator,
            process=options.process,
            folder=options.out,
        )
        if launch.processes < 1 or not 0 <= launch.process < launch.processes:
            raise ValueError(
                f"needs 0 <= process < processes, got --process {launch.process} --processes "
                f"{launch.processes}"
            )
        if launch.processes > 1 and (mesh is None or launch.devices % launch.processes):
            raise ValueError(
                "several processes need a mesh whose devices they share evenly, got --mesh "
                f"{options.mesh} --processes {launch.processes}"
            )
        return launch

    @property
    def devices(self) -> int:
        """Of the whole mesh."""
        sizes = (self.mesh or {}).values()
        total = 1
        for size in sizes:
            total *= size
        return total

    @property
    def starts_others(self) -> bool:
        """Whether this process computes nothing itself."""
        return self.processes > 1 and self.coordinator is None

    @property
    def was_started(self) -> bool:
        """Whether `start_all` made this process: it holds the other end of its input."""
        return os.environ.get(STARTED) is not None

    def join(self) -> None:
        """Makes the devices, and finds the other processes."""
        flags = os.environ.get("XLA_FLAGS", "")
        if self.mesh is not None and "host_platform_device_count" not in flags:
            jax.config.update("jax_num_cpu_devices", self.devices // self.processes)
        if self.processes > 1:
            _silence_gloo()
            # The fastest waits in its first sum while the slowest compiles: 40 seconds may be few.
            waits = (f"--xla_cpu_collective_{name}={FIRST_SUM}" for name in TIMEOUTS)
            os.environ["XLA_FLAGS"] = " ".join([*waits, flags])
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.distributed.initialize(self.coordinator, self.processes, self.process)
        if self.mesh is not None and len(jax.devices()) != self.devices:
            raise ValueError(
                f"the mesh has {self.devices} devices, got {len(jax.devices())} "
                f"({jax.devices()[0].device_kind}); choose other sizes"
            )

    def start_all(self, argv: Sequence[str]) -> int:
        """Runs all processes on this machine; returns the exit status.

        Process 0 prints as the program alone does, the others into a file in `folder`. When one is
        lost, the others end.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        workers = [self._start(argv, address, number) for number in range(self.processes)]

        def forward(number: int, _: object) -> None:
            for worker in workers:
                worker.send_signal(number)

        # Ctrl-C reaches every process of the terminal by itself.
        signal.signal(signal.SIGINT, lambda *_: None)
        signal.signal(signal.SIGTERM, forward)
        try:
            return self._wait(workers, argv)
        finally:
            for worker in workers:
                worker.kill()

    def _start(self, argv: Sequence[str], address: str, number: int) -> Worker:
        words = [sys.executable, sys.argv[0], *argv, "--coordinator", address]
        words += ["--process", str(number)]
        started = os.environ | {STARTED: "1"}
        if number == 0:
            return subprocess.Popen(words, stdin=subprocess.PIPE, env=started)
        with self._log(number).open("wb") as file:
            return subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=file, stderr=file, env=started
            )

    def _wait(self, workers: Sequence[Worker], argv: Sequence[str]) -> int:
        """Waits until all have ended, by themselves or because one was lost, which is printed."""
        failed: list[int] = []
        since = 0.0
        while any(worker.poll() is None for worker in workers):
            time.sleep(0.05)
            if failed and time.monotonic() - since > PATIENCE:
                break
            since = since if failed else time.monotonic()
            failed += [i for i, worker in enumerate(workers) if worker.poll() and i not in failed]
        failed += [i for i, worker in enumerate(workers) if worker.poll() and i not in failed]
        left = [worker for worker in workers if worker.poll() is None]
        for worker in left:
            worker.kill()
            worker.wait()
        statuses = [worker.returncode for worker in workers]
        # Rather one that was killed than those that noticed it, by giving up or aborting.
        noticed = (LOST, -signal.SIGABRT)
        lost = min(failed, key=lambda i: (statuses[i] in noticed, failed.index(i)), default=0)
        status = statuses[lost]
        # Process 0 prints its error itself (options, a full disk); so do all that agree.
        if status >= 0 and status != LOST and (lost == 0 or not left):
            return status
        print(self._ending(lost, status, argv), file=sys.stderr)
        return LOST

    def _ending(self, number: int, status: int, argv: Sequence[str]) -> str:
        if status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        else:
            how = f"ended with status {status}, see {self._log(number)}"
        return (
            f"stopped: process {number} of {self.processes} {how}; the others have ended, and "
            f"every checkpoint is whole; to continue: {resuming(argv)}"
        )

    def note(self, text: str) -> None:
        """Adds a line to this process's log."""
        with self._log(self.process).open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    def _log(self, number: int) -> Path:
        """The log of a process: of process 0 its losses, of the others all that they print."""
        return self.folder / f"process-{number}.log"

    def watch_starter(self) -> None:
        """Ends this process when the one that started it is gone: nobody would print a loss."""

        def watch() -> None:
            # Nothing is ever written there: reading ends when the other end is closed.
            os.read(0, 1)
            os._exit(LOST)

        if self.was_started:
            threading.Thread(target=watch, daemon=True).start()


def _silence_gloo() -> None:
    """Leaves standard output to Python: Gloo prints every connection that it makes."""
    sys.stdout.flush()
    stdout = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    sys.stdout = os.fdopen(stdout, "w", buffering=1, encoding="utf-8")


def resuming(argv: Sequence[str]) -> str:
    """The command that goes on."""
    again = [word for word in argv if word not in ("--overwrite", "--resume")] + ["--resume"]
    return shlex.join(["python", sys.argv[0], *again])
