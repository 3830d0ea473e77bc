"""Microscaling (MX) and float8 for JAX and Flax, bit for bit.

`quantize` makes an `MXArray`; `matmul`, `dot_general` and `einsum` take a recipe; `nn.linen` and
`nn.nnx` are Flax layers with one. Start with `mx_jax.recipes`.
"""

import importlib as _importlib
import signal as _signal
import sys as _sys
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

# `python -m mx_jax`, while Python looks for it: the imports below take seconds, nothing has begun,
# and Ctrl-C ends them without a traceback.
_STARTING = _sys.argv[:1] == ["-m"] and (
    _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
)
if _STARTING:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

from mx_jax import formats as formats
from mx_jax import nn as nn
from mx_jax import recipes as recipes
from mx_jax import sharding as sharding
from mx_jax.mxarray import MXArray as MXArray
from mx_jax.ops import only_backend as only_backend
from mx_jax.ops import prefer_backends as prefer_backends
from mx_jax.ops.dot_general import dot_general as dot_general
from mx_jax.ops.dot_general import matmul as matmul
from mx_jax.ops.einsum import einsum as einsum
from mx_jax.ops.export import export_targets as export_targets
from mx_jax.ops.packing import pack_weights as pack_weights
from mx_jax.ops.quantize import cast as cast
from mx_jax.ops.quantize import cast_cotangent as cast_cotangent
from mx_jax.ops.quantize import dequantize as dequantize
from mx_jax.ops.quantize import quantize as quantize
from mx_jax.ops.quantize import quantize_both as quantize_both
from mx_jax.ops.ragged_dot import expert_ragged_dot as expert_ragged_dot
from mx_jax.ops.ragged_dot import ragged_dot as ragged_dot
from mx_jax.ops.remat import save_products as save_products
from mx_jax.ops.remat import save_quantized as save_quantized
from mx_jax.optimizer import quantize_state as quantize_state
from mx_jax.packed import PackedMXArray as PackedMXArray

if _TYPE_CHECKING:
    from mx_jax import calibrate as calibrate
    from mx_jax import checkpoint as checkpoint
    from mx_jax import convert as convert
    from mx_jax import inspect as inspect
    from mx_jax import testing as testing

if _STARTING:
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)

__version__ = "0.1.0"
# Imported when they are first used: few programs need them, and together they take half the time.
_LATE = ("calibrate", "checkpoint", "convert", "inspect", "testing")


def __getattr__(name: str) -> _Any:
    if name == "__all__":
        return __dir__()
    if name in _LATE:
        return _importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """What users need: neither what this module imports for itself nor the modules inside."""
    own = {name for name, value in globals().items() if not isinstance(value, _ModuleType)}
    public = {name for name in own if not name.startswith("_")}
    return sorted({*public, *_LATE, "formats", "nn", "recipes", "sharding", "__version__"})
