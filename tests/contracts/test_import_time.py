"""What `import mx_jax` costs a program that has imported JAX and Flax, and what it leaves alone."""

from tests.processes import printed

LATE = ("calibrate", "checkpoint", "convert", "inspect", "testing")
# Lines of the modules of mx_jax that a program of flax.linen imports.
MOST_LINES = 13_130
MEASURED = """
import signal, sys, time
# Ignored, if who runs the tests ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)
start = time.process_time()
import jax, flax.linen, flax.nnx
others = time.process_time()
import mx_jax
ours = time.process_time()
import mx_jax.nn.linen
files = [m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "mx_jax"]
print(others - start, ours - others, sum(len(open(file).readlines()) for file in files))
"""
CHECKED = f"""
# Ctrl-C is the program's, whatever its words are.
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
from jax._src import xla_bridge
# A program may choose a platform, or join other processes, after it has imported the library.
assert not xla_bridge.backends_are_initialized()
late = {LATE}
loaded = [name for name in late if f"mx_jax.{{name}}" in sys.modules]
assert not loaded, sorted(loaded)
# Kernels for GPUs and their compiler are imported by the calls that they take.
kernels = {{"jax.experimental.pallas.mosaic_gpu", "mx_jax.backends.pallas_gpu.wgmma"}}
assert not kernels & {{*sys.modules}}
assert set(late) <= set(dir(mx_jax))
assert all(getattr(mx_jax, name) is sys.modules[f"mx_jax.{{name}}"] for name in late)
assert not hasattr(mx_jax, "nothing")
"""


def test_import_takes_little_beside_jax_and_flax():
    """And what few programs need is imported when it is used."""
    # CPU time of the process, the best of two runs: the machine does other things too.
    # Bytecode is what a second import finds, as an installed library's does.
    run = ("-c", MEASURED + CHECKED, "mx_jax")
    times = [
        tuple(map(float, printed(*run, PYTHONDONTWRITEBYTECODE=None).split())) for _ in range(2)
    ]
    others, each, lines = map(min, zip(*times, strict=True))
    assert each < 0.2 * others, f"{each:.2f} s, and jax and flax {others:.2f} s"
    assert lines <= MOST_LINES
