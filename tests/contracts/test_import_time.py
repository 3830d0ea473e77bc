"""What `import mx_jax` costs a program that has imported JAX and Flax."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LATE = ("calibrate", "checkpoint", "convert", "inspect", "testing")
MEASURED = """
import sys, time
start = time.process_time()
import jax, flax.linen, flax.nnx
others = time.process_time()
import mx_jax
own = time.process_time()
print(others - start, own - others)
"""
CHECKED = f"""
late = {LATE}
loaded = [name for name in late if f"mx_jax.{{name}}" in sys.modules]
assert not loaded, sorted(loaded)
assert set(late) <= set(dir(mx_jax))
assert all(getattr(mx_jax, name) is sys.modules[f"mx_jax.{{name}}"] for name in late)
assert not hasattr(mx_jax, "nothing")
"""


def in_new_process(program: str) -> str:
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    # Bytecode is what a second import finds, as an installed library's does.
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, env=variables, check=True, capture_output=True, text=True, timeout=300
    ).stdout


def test_import_takes_little_beside_jax_and_flax():
    """And what few programs need is imported when it is used."""
    # CPU time of the process, the best of several runs: the machine does other things too.
    times = [tuple(map(float, in_new_process(MEASURED + CHECKED).split())) for _ in range(3)]
    others, own = map(min, zip(*times, strict=True))
    assert own < 0.2 * others, f"{own:.2f} s, and jax and flax {others:.2f} s"
