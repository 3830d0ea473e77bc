"""Processes that end with whoever runs them, however that ends."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mx_jax.measure import command, process, worker
from mx_jax.measure.process import run_process

pytestmark = pytest.mark.one_python(reason="only processes and signals")

# Without the package, whose import would take most of the time.
_IMPORT = f"import os, sys, time; sys.path.insert(0, {str(Path(process.__file__).parent)!r})"
# Sleeps with the interpreter's lock held, as a compiler that hangs may.
_HANGS = "import ctypes; ctypes.PyDLL(None).sleep(60)"


def test_what_a_process_started_ends_with_it(tmp_path: Path):
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(1.5); open({str(mark)!r}, 'w')"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    ended = run_process([sys.executable, "-c", program], 0.7)
    assert ended.why == "no answer after 0.7 s: it hangs?"
    time.sleep(1.5)
    assert not mark.exists()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=str)
@pytest.mark.parametrize(
    ("guard", "case"),
    [
        ("follow_stdin", "time.sleep(60)"),
        # It has the other end of the pipe that is asked below, so it must end too.
        ("follow_stdin", "os.system('sleep 60')"),
        pytest.param(
            "end_with_parent",
            _HANGS,
            marks=pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's"),
        ),
    ],
    ids=["sleeps", "runs another", "holds the lock"],
)
def test_a_long_case_ends_with_the_command(
    tmp_path: Path, how: signal.Signals, guard: str, case: str
):
    alive = tmp_path / "alive"
    os.mkfifo(alive)
    start = f"{_IMPORT}; from process import *"
    case = (
        f"{start}; end = os.open({str(alive)!r}, os.O_WRONLY); os.set_inheritable(end, True); "
        f"{guard}(); os.write(end, b'.'); {case}"
    )
    # Who starts tests in a shell's background starts them deaf to Ctrl-C.
    hears = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    run = f"{start}; {hears}; run_process([sys.executable, '-c', {case!r}], 60)"
    with (
        subprocess.Popen([sys.executable, "-c", run], stderr=subprocess.DEVNULL) as parent,
        alive.open("rb") as end,
    ):
        assert end.read(1) == b"."
        parent.send_signal(how)
        assert select.select([end], [], [], 20)[0] and end.read() == b""


def test_a_case_of_the_command_is_guarded(monkeypatch: pytest.MonkeyPatch):
    done: list[str] = []
    monkeypatch.setattr(command, "end_with_parent", lambda: done.append("guarded"))
    monkeypatch.setattr(worker, "answer", lambda *_, **__: done.append("measured") or 0)
    from mx_jax.cli import main

    assert main(["gpu", "--one", '"machine"']) == 0
    assert done == ["guarded", "measured"]
