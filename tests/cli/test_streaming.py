"""Commands go through a checkpoint tensor by tensor: memory for the largest, not for all."""

import sys
import textwrap
from pathlib import Path

import pytest

from tests.processes import printed

# A tensor has 8 MiB in float32, 1 MiB as MXFP4. What a command takes for one, and to compile,
# shows on the file with few; on that with many nothing may come on top.
PROGRAM = textwrap.dedent(
    """
    import contextlib, io, re, sys, threading
    from pathlib import Path
    import numpy as np
    import safetensors.numpy
    from mx_jax.commands import main

    folder = Path(sys.argv[1])

    def private():
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"RssAnon:\\s+(\\d+)", status)[1]) / 1024

    def peak(words):
        done, most = threading.Event(), [private()]
        def watch():
            while not done.wait(0.001):
                most.append(private())
        thread = threading.Thread(target=watch)
        before = most[0]
        thread.start()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            status = main([str(word) for word in words])
        done.set()
        thread.join()
        assert status in (0, 1), words
        return max(most) - before

    def commands(name):
        plain, others, out, values = (
            folder / f"{name}.{part}.safetensors" for part in ("plain", "others", "out", "values")
        )
        to = ["--force", "--to"]
        return {
            "quantize": ["quantize", plain, others, "--format", "mxfp4", *to, "compressed-tensors"],
            "transcode": ["convert", others, out, *to, "modelopt-nvfp4"],
            "dequantize": ["dequantize", others, values, "--force"],
            "inspect": ["inspect", values, "--reference", plain],
        }

    rng = np.random.default_rng(0)
    for name, count in ("few", 2), ("many", 8):
        tensors = {
            f"l.{i}.up.weight": rng.standard_normal((1024, 2048)).astype(np.float32)
            for i in range(count)
        }
        safetensors.numpy.save_file(tensors, folder / f"{name}.plain.safetensors")
    del tensors
    # What a first run loads is none of its peak. What is read off now and then misses some peaks:
    # the short ones are repeated until as many tensors went by as in the long one.
    sys.setswitchinterval(1e-4)
    for kind, name in (("first", "few"), *[("few", "few")] * 4, ("many", "many")):
        for command, words in commands(name).items():
            print(kind, command, peak(words))
    """
)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads memory from /proc")
def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path):
    """A command takes few MiB more for a file of 8 tensors than for one of 2."""
    # Memory that is freed goes back at once, where glibc would keep some.
    text = printed("-c", PROGRAM, tmp_path, MALLOC_MMAP_THRESHOLD_="65536")
    peaks: dict[str, dict[str, float]] = {"first": {}, "few": {}, "many": {}}
    for line in text.splitlines():
        name, command, mib = line.split()
        peaks[name][command] = max(float(mib), peaks[name].get(command, 0))
    result = {command: mib - peaks["few"][command] for command, mib in peaks["many"].items()}
    assert len(result) == 4 and max(result.values()) < 8, result
