"""What is installed here, and which backend computes what: `python -m mx_jax env`."""

import importlib.metadata
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from rich.table import Table

from mx_jax import recipes
from mx_jax.backends import calls, select
from mx_jax.backends.cpu_ffi import library
from mx_jax.formats import MXFP4, MXFP8_E4M3
from mx_jax.inspect.tables import rich_table
from mx_jax.ops.dot_general import matmul
from mx_jax.ops.packing import pack_weights
from mx_jax.ops.quantize import dequantize, quantize, quantize_both
from mx_jax.specs import MatmulRecipe

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
_SIZE = 1024


def _product(recipe: MatmulRecipe | str) -> tuple[type[calls.Call], Callable[[jax.Array], Any]]:
    return calls.MatmulCall, lambda x: matmul(x, x, recipe=recipe)


# One call of each kind that matters.
_EXAMPLES: dict[str, tuple[type[calls.Call], Callable[[jax.Array], Any]]] = {
    "cast to MXFP8": (calls.QuantizeCall, lambda x: quantize(x, MXFP8_E4M3)),
    "cast along both axes": (calls.QuantizeBothCall, lambda x: quantize_both(x, MXFP8_E4M3)),
    "dequantize MXFP8": (calls.DequantizeCall, lambda x: dequantize(quantize(x, MXFP8_E4M3))),
    "bfloat16 x MXFP4": _product(recipes.weight_only(MXFP4)),
    "pack MXFP4 weights": (calls.PackCall, lambda x: pack_weights(quantize(x, MXFP4))),
    "MXFP8 x MXFP8": _product("mxfp8"),
    "NVFP4 x NVFP4": _product("nvfp4"),
    "float8 x float8, scales by rows": _product("float8_rowwise"),
}


def no_device() -> str | None:
    """Why JAX has no device here, as where JAX_PLATFORMS names what the machine lacks, or None."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # of a platform that it knows, and has not
        said = str(error) or "this machine, or this installation of JAX, has none of its devices"
        asked = os.environ.get("JAX_PLATFORMS")
        return f"JAX finds no device for JAX_PLATFORMS={asked}: {' '.join(said.split())}"
    return None


def describe() -> dict[str, Any]:
    """Versions, devices, the C++ library, backends in order, and variables, as JSON takes them."""
    # The checkout that runs, which need not be what is installed.
    own = sys.modules[__name__.partition(".")[0]].__version__
    versions = {"mx_jax": own, "Python": platform.python_version()}
    loaded = library.load()
    native: Any = (None, None, None, loaded)
    if not isinstance(loaded, str):
        native = (str(loaded.path), loaded.isa, loaded.detected_isa, None)
    facts = ("path", "instruction_set", "best_instruction_set", "missing")
    found: dict[str, Any] = {
        "versions": versions | {name: importlib.metadata.version(name) for name in _PACKAGES},
        "system": platform.platform(),
        "cpu_library": dict(zip(facts, native, strict=True)),
        "variables": {name: os.environ.get(name) for name in _VARIABLES},
    }
    if (error := no_device()) is not None:
        return found | {"error": error}
    devices = jax.devices()
    numbers = Counter((device.platform, device.device_kind) for device in devices)
    target, selections = select.current_target(), {}
    x = jax.ShapeDtypeStruct((_SIZE, _SIZE), np.dtype("bfloat16"))
    for name, (kind, function) in _EXAMPLES.items():
        with select.recording() as recorder:
            jax.eval_shape(function, x)
        selections[name] = next(s for s in recorder.selections if isinstance(s.call, kind))
    backends, named = [], select.only_if_named()
    for backend in select.known_backends():
        reasons = {name: backend.rejects(s.call, s.target) for name, s in selections.items()}
        backends.append(
            {
                "name": backend.name,
                "only_if_named": backend.name in named,
                "takes": [name for name, reason in reasons.items() if reason is None],
                "rejects": {name: reason for name, reason in reasons.items() if reason is not None},
            }
        )
    return found | {
        "devices": [{"platform": p, "kind": k, "number": n} for (p, k), n in numbers.items()],
        "target": {
            "platform": target.platform,
            "compute_capability": target.compute_capability and list(target.compute_capability),
            "num_devices": target.num_devices,
        },
        "backends": backends,
        "calls": {name: s.backend or "two casts" for name, s in selections.items()},
    }


def tables(found: dict[str, Any]) -> list[Table]:
    """What `describe` found, for people: one table for each kind of facts."""
    path, used, best, missing = found["cpu_library"].values()
    library_rows = {"path": "-", "not used, because": f"{missing}"}
    if path is not None:
        more = "" if best == used else f", where the machine has {best}"
        library_rows = {"path": path, "instruction set": used + more}
    pairs = {
        "Versions": found["versions"] | {"system": found["system"]},
        "C++ library": library_rows,
        "Variables": {name: value or "-" for name, value in found["variables"].items()},
    }
    if "error" not in found:
        target = found["target"]
        capability = ".".join(map(str, target["compute_capability"] or ()))
        machine = f"{target['platform']} {capability}".strip()
        devices = {f"{row['number']} x {row['kind']}": row["platform"] for row in found["devices"]}
        devices["calls are for"] = f"{machine}, num_devices={target['num_devices']}"
        pairs["Devices"] = devices
    shown = [
        rich_table(title, ("what", "value"), rows.items(), left=2) for title, rows in pairs.items()
    ]
    if "error" in found:
        return shown
    by_backend = []
    for backend in found["backends"]:
        by_reason: dict[str, list[str]] = {}
        for call, reason in backend["rejects"].items():
            by_reason.setdefault(reason, []).append(call)
        reasons = [f"{', '.join(calls)}: {reason}" for reason, calls in by_reason.items()]
        if len(by_reason) == 1 and not backend["takes"]:
            reasons = list(by_reason)
        asked = "only if named" if backend["only_if_named"] else "by default"
        takes = ", ".join(backend["takes"]) or "-"
        by_backend.append((backend["name"], asked, takes, "\n".join(reasons) or "-"))
    by_call, columns = (
        found["calls"].items(),
        ("backend", "asked", "takes", "does not take, because"),
    )
    return [
        *shown,
        rich_table("Who computes what by default", ("call", "backend"), by_call, left=2),
        rich_table("Backends, in order", columns, by_backend, left=4),
    ]
