"""Microscaling (MX) and float8 for JAX and Flax, bit for bit.

    q = mx_jax.quantize(x, "mxfp8")             # codes and scales; q.dequantize() gives values
    y = mx_jax.matmul(x, w, recipe="mxfp8")     # with gradients, quantized by the recipe too
    layer = mx_jax.nn.linen.Dense(16, recipe="mxfp8")
    model = mx_jax.convert.linen(model, mx_jax.convert.Rule(".*", "mxfp8"))

Arrays
    quantize, dequantize            an array to an MXArray, and back
    cast, cast_cotangent            both at once: values, or gradients, as a format holds them
    quantize_both                   along both axes of a matrix
    pack_weights                    an MXArray in the order of this machine's kernels: PackedMXArray
    formats                         the formats; a name, such as "mxfp4", stands for one
Products, which take a recipe
    matmul, einsum, dot_general     as those of jax.numpy and jax.lax
    ragged_dot, expert_ragged_dot   rows in groups, on one device or several
    recipes                         recipes.names() lists them; with_ changes one
    save_products, save_quantized   policies for jax.checkpoint
Models
    nn.linen, nn.nnx                Flax's layers with a recipe
    convert                         quantizes linen, nnx, Equinox and plain functions by rules
    quantize_state                  an optax optimizer with its moments in 8 bits
    calibrate, checkpoint           GPTQ and searched scales; files
Several devices, and looking inside
    sharding                        how operands move between devices, as codes
    inspect                         explain, capture: which kernel runs, and what casts do to values
    only_backend, prefer_backends   choose kernels by name
    export_targets                  names that jax.export has to allow
    testing                         asks about a machine that need not be there

`help(mx_jax.quantize)` describes one of them; `python -m mx_jax` lists the commands.
"""

import importlib as _importlib
import os as _os
import signal as _signal
import sys as _sys
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if (
    _sys.argv[:1] == ["-m"]  # while Python looks for what it is to run: `python -m mx_jax`
    and _sys.orig_argv[-len(_sys.argv)].endswith("mx_jax")
    and _signal.getsignal(_signal.SIGINT) is not _signal.SIG_IGN
):
    # Ctrl-C while modules load: nothing is half made, and an exception could be dropped.
    def _quit(*_: object) -> None:
        _os.write(2, b"mx_jax: interrupted\n")
        _os._exit(128 + _signal.SIGINT)

    _signal.signal(_signal.SIGINT, _quit)

from mx_jax import formats as formats
from mx_jax import nn as nn
from mx_jax import recipes as recipes
from mx_jax import sharding as sharding
from mx_jax.formats.removed import missing_attribute as _missing_attribute
from mx_jax.mxarray import MXArray as MXArray
from mx_jax.ops import only_backend as only_backend
from mx_jax.ops import prefer_backends as prefer_backends
from mx_jax.ops.dot_general import dot_general as dot_general
from mx_jax.ops.dot_general import einsum as einsum
from mx_jax.ops.dot_general import matmul as matmul
from mx_jax.ops.packing import pack_weights as pack_weights
from mx_jax.ops.programs import export_targets as export_targets
from mx_jax.ops.programs import save_products as save_products
from mx_jax.ops.programs import save_quantized as save_quantized
from mx_jax.ops.quantize import cast as cast
from mx_jax.ops.quantize import cast_cotangent as cast_cotangent
from mx_jax.ops.quantize import dequantize as dequantize
from mx_jax.ops.quantize import quantize as quantize
from mx_jax.ops.quantize import quantize_both as quantize_both
from mx_jax.packed import PackedMXArray as PackedMXArray

if _TYPE_CHECKING:
    from mx_jax import calibrate as calibrate
    from mx_jax import checkpoint as checkpoint
    from mx_jax import convert as convert
    from mx_jax import inspect as inspect
    from mx_jax import testing as testing
    from mx_jax.ops.ragged_dot import expert_ragged_dot as expert_ragged_dot
    from mx_jax.ops.ragged_dot import ragged_dot as ragged_dot
    from mx_jax.optimizer import quantize_state as quantize_state

__version__ = "0.1.0"
# Imported when they are first used: few programs need them, and together they take half the time.
_LATE = ("calibrate", "checkpoint", "convert", "inspect", "testing")
_LATE_FUNCTIONS = {
    "ragged_dot": "ops.ragged_dot",
    "expert_ragged_dot": "ops.ragged_dot",
    "quantize_state": "optimizer",
}


def __getattr__(name: str) -> _Any:
    if name in _LATE:
        return _importlib.import_module(f"{__name__}.{name}")
    if name in _LATE_FUNCTIONS:
        return getattr(_importlib.import_module(f"{__name__}.{_LATE_FUNCTIONS[name]}"), name)
    raise _missing_attribute(__name__, name)


def __dir__() -> list[str]:
    """What users need: neither what this module imports for itself nor the modules inside."""
    values = globals().items()
    public = {x for x, value in values if not isinstance(value, _ModuleType) and x[0] != "_"}
    late = {*_LATE, *_LATE_FUNCTIONS}
    return sorted({*public, *late, "formats", "nn", "recipes", "sharding", "__version__"})
