"""What is installed here, and who would compute what: the facts behind `python -m mx_jax env`."""

import importlib.metadata
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from mx_jax import recipes
from mx_jax.backends import evidence
from mx_jax.backends.calls import (
    Call,
    DequantizeCall,
    MatmulCall,
    PackCall,
    QuantizeBothCall,
    QuantizeCall,
)
from mx_jax.backends.cpu_ffi import library
from mx_jax.backends.records import Selection, recording
from mx_jax.backends.select import current_target, known_backends, only_if_named
from mx_jax.formats import MXFP4, MXFP8_E4M3
from mx_jax.ops.dot_general import matmul
from mx_jax.ops.packing import pack_weights
from mx_jax.ops.quantize import dequantize, quantize
from mx_jax.ops.quantize_both import quantize_both
from mx_jax.specs import MatmulRecipe

_PACKAGES = ("jax", "jaxlib", "flax", "ml_dtypes", "numpy")
_VARIABLES = (
    library.LIBRARY_VARIABLE,
    library.ISA_VARIABLE,
    evidence.VARIABLE,
    "JAX_PLATFORMS",
    "JAX_ENABLE_X64",
    "JAX_NUM_CPU_DEVICES",
    "CUDA_VISIBLE_DEVICES",
    "XLA_FLAGS",
)
_SIZE = 1024


def describe() -> dict[str, Any]:
    """Versions, devices, the C++ library, backends in order, and variables, as JSON takes them.

    Returns:
      A dict with the keys `versions`, `system`, `cpu_library`, `variables`, and with `devices`,
      `target`, `backends`, `calls`, or `error` instead where JAX has no device.
    """
    found: dict[str, Any] = {
        "versions": _versions(),
        "system": platform.platform(),
        "cpu_library": _cpu_library(),
        "variables": {name: os.environ.get(name) for name in _VARIABLES},
    }
    try:
        devices = jax.devices()
    except RuntimeError as error:
        return found | {"error": f"JAX finds no device: {error}"}
    numbers = Counter((device.platform, device.device_kind) for device in devices)
    target, selections = current_target(), _selections()
    return found | {
        "devices": [{"platform": p, "kind": k, "number": n} for (p, k), n in numbers.items()],
        "target": {
            "platform": target.platform,
            "compute_capability": target.compute_capability and list(target.compute_capability),
            "num_devices": target.num_devices,
        },
        "backends": _backends(selections),
        "calls": {name: s.backend or "two casts" for name, s in selections.items()},
    }


def _versions() -> dict[str, str]:
    # The checkout that runs, which need not be what is installed.
    own = sys.modules[__name__.partition(".")[0]].__version__
    others = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"mx_jax": own, "Python": platform.python_version()} | others


def _cpu_library() -> dict[str, str | None]:
    loaded = library.load()
    here = not isinstance(loaded, str)
    return {
        "path": str(loaded.path) if here else None,
        "instruction_set": loaded.isa if here else None,
        "best_instruction_set": loaded.detected_isa if here else None,
        "missing": None if here else loaded,
    }


def _backends(selections: dict[str, Selection]) -> list[dict[str, Any]]:
    named = only_if_named()
    found = []
    for backend in known_backends():
        reasons = {name: backend.rejects(s.call, s.target) for name, s in selections.items()}
        found.append(
            {
                "name": backend.name,
                "only_if_named": backend.name in named,
                "takes": [name for name, reason in reasons.items() if reason is None],
                "rejects": {name: reason for name, reason in reasons.items() if reason is not None},
            }
        )
    return found


def _selections() -> dict[str, Selection]:
    """What is selected for one call of each kind that matters, of common sizes."""
    x = jax.ShapeDtypeStruct((_SIZE, _SIZE), np.dtype("bfloat16"))
    found = {}
    for name, (kind, function) in _EXAMPLES.items():
        with recording() as recorder:
            jax.eval_shape(function, x)
        found[name] = next(s for s in recorder.selections if isinstance(s.call, kind))
    return found


def _product(recipe: MatmulRecipe | str) -> tuple[type[Call], Callable[[jax.Array], Any]]:
    return MatmulCall, lambda x: matmul(x, x, recipe=recipe)


_EXAMPLES: dict[str, tuple[type[Call], Callable[[jax.Array], Any]]] = {
    "cast to MXFP8": (QuantizeCall, lambda x: quantize(x, MXFP8_E4M3)),
    "cast along both axes": (QuantizeBothCall, lambda x: quantize_both(x, MXFP8_E4M3)),
    "dequantize MXFP8": (DequantizeCall, lambda x: dequantize(quantize(x, MXFP8_E4M3))),
    "bfloat16 x MXFP4": _product(recipes.weight_only(MXFP4)),
    "pack MXFP4 weights": (PackCall, lambda x: pack_weights(quantize(x, MXFP4))),
    "MXFP8 x MXFP8": _product("mxfp8"),
    "NVFP4 x NVFP4": _product("nvfp4"),
    "float8 x float8, scales by rows": _product("float8_rowwise"),
}
