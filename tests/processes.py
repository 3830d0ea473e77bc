"""Python in processes of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_python(
    *arguments: str | Path, cwd: Path = ROOT, **variables: str | None
) -> subprocess.CompletedProcess[str]:
    """Run `python *arguments`, its environment with these variables, without those of None."""
    paths = os.pathsep.join(filter(None, [str(cwd), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, **variables}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={name: value for name, value in environment.items() if value is not None},
        capture_output=True,
        text=True,
        check=False,
    )


def printed(*arguments: str | Path, **variables: str | None) -> str:
    """What it prints; it must not fail."""
    done = run_python(*arguments, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
