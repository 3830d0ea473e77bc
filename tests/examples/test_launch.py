"""What the command that starts several processes says when they end, with stand-ins for them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def wait(example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """The status and what is said when processes run these programs."""
    launch = example("lm.launch")
    monkeypatch.setattr(launch, "PATIENCE", 1.0)
    monkeypatch.setattr(sys, "argv", ["train_lm.py"])

    def run(*programs: str) -> tuple[int, str]:
        own = launch.Launch(
            mesh={"data": 2}, processes=len(programs), coordinator=None, process=0, folder=tmp_path
        )
        workers = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
        status = own._wait(workers, ["--overwrite", "--seeds", "1"])
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
