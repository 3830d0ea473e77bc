"""What is installed here, and which backend computes what: `python -m mx_jax env`."""

import importlib.metadata
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax

from mx_jax import recipes
from mx_jax.backends.cpu_ffi import library
from mx_jax.formats import MXFP4, MXFP8_E4M3
from mx_jax.inspect.explain import explain
from mx_jax.ops.dot_general import matmul
from mx_jax.ops.quantize import dequantize, quantize, quantize_both

_PACKAGES = ("jax", "jaxlib", "flax", "ml_dtypes", "numpy")
_VARIABLES = (
    library.LIBRARY_VARIABLE,
    library.ISA_VARIABLE,
    "JAX_PLATFORMS",
    "JAX_ENABLE_X64",
    "JAX_NUM_CPU_DEVICES",
    "CUDA_VISIBLE_DEVICES",
    "XLA_FLAGS",
)
# Calls of each kind that matters, of bfloat16 [1024, 1024]: the last that a function makes counts.
_CALLS: dict[str, Callable[[jax.Array], Any]] = {
    "cast to MXFP8": lambda x: quantize(x, MXFP8_E4M3),
    "cast along both axes": lambda x: quantize_both(x, MXFP8_E4M3),
    "dequantize MXFP8": lambda x: dequantize(quantize(x, MXFP8_E4M3)),
    "bfloat16 x MXFP4": lambda x: matmul(x, x, recipe=recipes.weight_only(MXFP4)),
    "MXFP8 x MXFP8": lambda x: matmul(x, x, recipe="mxfp8"),
    "NVFP4 x NVFP4": lambda x: matmul(x, x, recipe="nvfp4"),
    "float8 x float8, scales by rows": lambda x: matmul(x, x, recipe="float8_rowwise"),
}


def no_device() -> str | None:
    """Why JAX has no device here, as where JAX_PLATFORMS names what the machine lacks, or None."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # of a platform that it knows, and has not
        said = str(error) or "this machine, or this installation of JAX, has none of its devices"
        platforms = os.environ.get("JAX_PLATFORMS")
        return f"JAX finds no device for JAX_PLATFORMS={platforms}: {' '.join(said.split())}"
    return None


def describe() -> dict[str, Any]:
    """Versions, devices, the C++ library, backends in order, and variables, as JSON takes them."""
    # The checkout that runs, which need not be what is installed.
    version = sys.modules[__name__.partition(".")[0]].__version__
    versions = {"mx_jax": version, "Python": platform.python_version()}
    loaded = library.load()
    native: Any = (None, None, None, loaded)
    if not isinstance(loaded, str):
        native = (str(loaded.path), loaded.isa, loaded.detected_isa, None)
    names = ("path", "instruction_set", "best_instruction_set", "missing")
    facts: dict[str, Any] = {
        "versions": versions | {name: importlib.metadata.version(name) for name in _PACKAGES},
        "system": platform.platform(),
        "cpu_library": dict(zip(names, native, strict=True)),
        "variables": {name: os.environ.get(name) for name in _VARIABLES},
    }
    if (error := no_device()) is not None:
        return facts | {"error": error}
    devices = jax.devices()
    numbers = Counter((device.platform, device.device_kind) for device in devices)
    x = jax.ShapeDtypeStruct((1024, 1024), "bfloat16")
    explained = {name: explain(function, x) for name, function in _CALLS.items()}
    rows = {name: version.rows[-1] for name, version in explained.items()}
    return facts | {
        "devices": [{"platform": p, "kind": k, "number": n} for (p, k), n in numbers.items()],
        "machine": next(iter(explained.values())).machine,
        "calls": {
            name: {"backend": row.backend, "how": row.how, "reasons": row.reasons}
            for name, row in rows.items()
        },
    }
