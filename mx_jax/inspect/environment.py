"""What is installed here, and who would compute what: the facts behind `python -m mx_jax env`."""

import importlib.metadata
import os
import platform
import sys
from collections import Counter
from typing import Any

import jax
import numpy as np

from mx_jax.backends.base import (
    Call,
    DequantizeCall,
    MatmulCall,
    PackCall,
    QuantizeBothCall,
    QuantizeCall,
    Target,
)
from mx_jax.backends.cpu_ffi import library
from mx_jax.backends.pallas_gpu import tuning
from mx_jax.backends.select import current_target, find, only_if_named
from mx_jax.backends.table import BACKENDS
from mx_jax.formats import FLOAT8_ROWWISE_E4M3, MXFP4, MXFP8_E4M3, NVFP4, BlockFormat
from mx_jax.specs import operand

_PACKAGES = ("jax", "jaxlib", "flax", "ml_dtypes", "numpy")
_VARIABLES = (
    library.LIBRARY_VARIABLE,
    library.ISA_VARIABLE,
    tuning.TILES_VARIABLE,
    "JAX_PLATFORMS",
    "JAX_ENABLE_X64",
    "JAX_NUM_CPU_DEVICES",
    "CUDA_VISIBLE_DEVICES",
    "XLA_FLAGS",
)
_SIZE = 1024
_BFLOAT16 = np.dtype("bfloat16")


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
    target = current_target()
    return found | {
        "devices": [{"platform": p, "kind": k, "number": n} for (p, k), n in numbers.items()],
        "target": {
            "platform": target.platform,
            "compute_capability": target.compute_capability and list(target.compute_capability),
            "num_devices": target.num_devices,
        },
        "backends": _backends(target),
        "calls": {name: _chosen(call, target) for name, call in _calls().items()},
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


def _backends(target: Target) -> list[dict[str, Any]]:
    named, calls = only_if_named(), _calls()
    found = []
    for backend in BACKENDS:
        reasons = {name: backend.rejects(call, target) for name, call in calls.items()}
        found.append(
            {
                "name": backend.name,
                "only_if_named": backend.name in named,
                "takes": [name for name, reason in reasons.items() if reason is None],
                "rejects": {name: reason for name, reason in reasons.items() if reason is not None},
            }
        )
    return found


def _chosen(call: Call, target: Target) -> str:
    choice = find(call, target)
    return "two casts" if choice is None else choice.backend.name


def _calls() -> dict[str, Call]:
    """One call of each kind that matters, of common sizes."""
    rows, columns = (_cast(axis) for axis in (-1, -2))
    shape, blocks = rows.shape, rows.blocks
    mxfp4 = PackCall(shape=shape, format=MXFP4, blocks=blocks, num_batch=0, contracting=(1,))
    return {
        "cast to MXFP8": rows,
        "cast along both axes": QuantizeBothCall(first=rows, second=columns),
        "dequantize MXFP8": DequantizeCall(
            shape=shape, dtype=_BFLOAT16, format=MXFP8_E4M3, blocks=blocks
        ),
        "bfloat16 x MXFP4": _product(None, MXFP4),
        "pack MXFP4 weights": mxfp4,
        "MXFP8 x MXFP8": _product(MXFP8_E4M3, MXFP8_E4M3),
        "NVFP4 x NVFP4": _product(NVFP4, NVFP4),
        "float8 x float8, scales by rows": _product(FLOAT8_ROWWISE_E4M3, FLOAT8_ROWWISE_E4M3),
    }


def _cast(axis: int) -> QuantizeCall:
    spec = operand(MXFP8_E4M3)
    return QuantizeCall(
        shape=(_SIZE, _SIZE),
        dtype=_BFLOAT16,
        format=spec.format,
        blocks=((axis, 32),),
        scale_rule=spec.scale_rule,
        rounding=spec.rounding,
    )


def _product(lhs: BlockFormat | None, rhs: BlockFormat) -> MatmulCall:
    return MatmulCall(
        lhs_shape=(_SIZE, _SIZE),
        rhs_shape=(_SIZE, _SIZE),
        num_batch=0,
        num_contracting=1,
        lhs_format=lhs,
        rhs_format=rhs,
        lhs_dtype=_BFLOAT16 if lhs is None else None,
        out_dtype=_BFLOAT16,
    )
