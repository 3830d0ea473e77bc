"""The language model on a mesh, in one process and in several, and what a lost process leaves."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
MESH = "--mesh", "data=2,fsdp=2,model=2"
STEPS = 6
OPTIONS = (
    f"--steps {STEPS} --d-model 64 --layers 1 --heads 2 --context 32 --batch 4 "
    "--eval-every 3 --eval-tokens 128 --checkpoint-every 2 --sample 0"
).split()
# Runs are compared with each other alone, so what they compile may be slow.
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
# Seconds: generous, for every process compiles the step on cores that are shared.
LIMIT = 600.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("processes")
    text = "\n".join(f"{n} times {n} is {n * n}" for n in range(200))
    (path / "text.txt").write_text(text)
    return path


def words(folder: Path, out: str) -> list[str]:
    paths = ["--data", str(folder / "text.txt"), "--out", str(folder / out)]
    return [*paths, *OPTIONS, *MESH, "--recipes", "mxfp8"]


def start(folder: Path, out: str, *options: str) -> subprocess.Popen[str]:
    """The program in two processes: devices are made before JAX is asked for any."""
    variables = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    variables |= {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": QUICK,
        # A pointer in the program of a mesh keeps it from being found again. Without it, programs
        # are told apart by their shapes: in a cache of their own, since all are of one recipe.
        "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
        "JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY": "1",
    }
    program = [sys.executable, str(EXAMPLES / "train_lm.py"), *words(folder, out)]
    return subprocess.Popen(
        [*program, "--processes", "2", *options],
        env=variables,
        cwd=EXAMPLES.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=LIMIT)
    return process.returncode, out, err


def measured(folder: Path, out: str) -> dict[str, Any]:
    """What a run that ended measured."""
    (run,) = json.loads((folder / out / "results.json").read_text())["runs"]
    assert run["finished"] and len(run["train_loss"]) == STEPS
    return {name: run[name] for name in ("train_loss", "validation", "averaged_loss")}


def workers(process: subprocess.Popen[str]) -> list[int]:
    """Process ids, in the order in which they were started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return sorted(map(int, children.split()))


def wait_until(happened: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LIMIT
    while not happened():
        assert process.poll() is None, ended(process)
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.slow
def test_two_processes_of_which_one_is_killed_learn_what_one_does(train_lm, folder: Path):
    """Killed is the one that coordinates the others, while it saves a checkpoint: the worst moment.

    Not bit for bit: sums of other parts are rounded otherwise. Of one process a resumed run is, as
    tests/examples/test_train_lm.py checks; who else may be killed, and what is said then, is below.
    """

    def is_saving() -> bool:
        saved = list((folder / "killed" / "checkpoints").glob("*/*"))
        return any(path.name == "2" for path in saved) and any(path.suffix for path in saved)

    process = start(folder, "killed")
    wait_until(is_saving, process)
    os.kill(workers(process)[0], signal.SIGKILL)
    killed = time.monotonic()
    status, _, complained = ended(process)
    assert status == 4 and time.monotonic() - killed < 60
    assert complained.startswith("stopped: process 0 of 2 was killed by SIGKILL; ")
    assert complained.endswith("--recipes mxfp8 --processes 2 --resume\n")
    # The command that the message names, but by this Python.
    status, printed, complained = ended(start(folder, "killed", "--resume"))
    assert status == 0, printed + complained
    assert "Gloo" not in printed and "Traceback" not in complained
    assert train_lm.main(words(folder, "alone")) == 0
    resumed = measured(folder, "killed")
    for name, learned in measured(folder, "alone").items():
        np.testing.assert_allclose(resumed[name], learned, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mesh", "rows=2"], "mesh names axes of data, fsdp, model once, with their sizes, got"),
        (["--processes", "2"], "several processes need a mesh whose devices they share evenly"),
        (["--mesh", "data=2", "--processes", "3"], "got --mesh data=2 --processes 3"),
        (["--processes", "2", "--process", "2"], "needs 0 <= process < processes, got --process 2"),
    ],
)
def test_wrong_places_are_refused(train_lm, capsys, options: list[str], message: str):
    assert train_lm.main(options) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 3, "fsdp": 1, "model": 1}, "batch must be a multiple of data * fsdp, got batch="),
        ({"data": 1, "fsdp": 1, "model": 3}, "heads must be a multiple of model, got heads=4 on a"),
    ],
)
def test_meshes_that_do_not_fit_are_refused(example, train_lm, sizes, message: str):
    with pytest.raises(ValueError, match=message.replace("*", r"\*")):
        example("lm.mesh").check_fits(sizes, train_lm.DEFAULT)


# What the command that starts several processes says when they end, with stand-ins for them ------


@pytest.fixture
def wait(example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """The status and what is said when processes run these programs."""
    launch = example("lm.launch")
    monkeypatch.setattr(launch, "PATIENCE", 1.0)
    monkeypatch.setattr(sys, "argv", ["train_lm.py"])

    def run(*programs: str) -> tuple[int, str]:
        started = launch.Launch(
            mesh={"data": 2}, processes=len(programs), coordinator=None, process=0, folder=tmp_path
        )
        workers = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
        status = started._wait(workers, ["--overwrite", "--seeds", "1"])
        assert all(worker.returncode is not None for worker in workers)
        return status, capsys.readouterr().err

    return run


FOREVER = "import time; time.sleep(100)"


def after(seconds: float, then: str) -> str:
    return f"import os, signal, time; time.sleep({seconds}); {then}"


def test_killed(wait):
    """One of the others aborts, one hangs: the one that was killed is named."""
    killed = "os.kill(os.getpid(), signal.SIGKILL)"
    status, said = wait(after(0.3, "os.abort()"), after(0.2, killed), after(0.3, FOREVER))
    assert status == 4
    assert said == (
        "stopped: process 1 of 3 was killed by SIGKILL; the others have ended, and every "
        "checkpoint is whole; to continue: python train_lm.py --seeds 1 --resume\n"
    )


def test_failed(wait, tmp_path: Path):
    """An error of its own, while the others wait for it; process 0 says its own itself."""
    assert wait("", "") == (0, "")
    assert wait("raise SystemExit(130)", FOREVER) == (130, "")
    status, said = wait(FOREVER, "raise SystemExit(1)")
    assert status == 4
    assert f"process 1 of 2 ended with status 1, see {tmp_path / 'process-1.log'}; the" in said


def test_a_starter_that_is_gone(example):
    """A process reads from the one that started it, and ends with it."""
    program = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); from lm.launch import Launch\n"
        "Launch.parse(['--mesh', 'data=2', '--processes', '2', '--coordinator', 'x:1'])"
        ".watch_starter()\n"
        "print('ready', flush=True); time.sleep(100)"
    )
    folder = str(Path(example("lm.launch").__file__).parents[1])
    worker = subprocess.Popen(
        [sys.executable, "-c", program, folder],
        env=os.environ | {example("lm.launch").STARTED: "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None and worker.stdin is not None
    assert worker.stdout.readline() == "ready\n"
    worker.stdin.close()
    assert worker.wait(timeout=30) == 4
    worker.stdout.close()
