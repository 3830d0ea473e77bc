"""Other libraries' quantizers, as they are meant to be called, behind one small interface.

None of them is needed: what cannot be imported, or does not know a format, is left out, and the
result says why. Imports are late because PyTorch takes seconds.
"""

import dataclasses
import functools
import importlib
import logging
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.environment import usable_cores
from benchmarks.timing import Case

# Makes a peer's function from a format, a scale rule and the high-precision array.
Maker = Callable[[str, str, jax.Array], Case | None]

DISTRIBUTIONS = ("qwix", "torchao", "torchmx", "torch")


class Unavailable(Exception):
    """Why a peer cannot run here."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """A library to compare with.

    Attributes:
      name: in tables.
      quantize: makes the case that quantizes an array along its last axis; None where it does not
        know the format and rule.
      dequantize: makes the case that goes back to the array's dtype.
    """

    name: str
    quantize: Maker
    dequantize: Maker


def make(peer: Peer, operation: str, format: str, rule: str, x: jax.Array) -> Case | str | None:
    """The peer's case; a reason where it cannot run; None where it does not know the format."""
    maker = peer.quantize if operation == "quantize" else peer.dequantize
    try:
        case = maker(format, rule, x)
        if case is not None:
            jax.block_until_ready(case.run())
    except Unavailable as reason:
        return str(reason)
    except Exception as error:  # a peer's own failure is a result, not the end of the run
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['?'])[0]}"
    return case


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        # Python ends some of these messages with where the module lies, which no result should say.
        why = re.sub(r" \([^()]*\)$", "", str(error))
        raise Unavailable(f"cannot import {name}: {why}") from None


# jax.nn: the quantizer inside jax.nn.scaled_dot_general, which has no public name ----------------


def _jax_nn_quantize(format: str, rule: str, x: jax.Array) -> Case | None:
    modes = {("mxfp8_e4m3", "rceil"): "mxfp8", ("nvfp4", "amax"): "nvfp4"}
    mode: Any = modes.get((format, rule))
    if mode is None:
        return None
    inner = _import("jax._src.cudnn.scaled_matmul_stablehlo")

    @jax.jit
    def quantize(x):
        scale = jnp.max(jnp.abs(x)).astype(jnp.float32) / (448.0 * 6.0) if mode == "nvfp4" else None
        return inner.quantize(x, jax.nn.get_scaled_dot_general_config(mode, scale)), scale

    return Case("jax.nn", lambda: quantize(x))


def _jax_nn_dequantize(format: str, rule: str, x: jax.Array) -> Case | None:
    return None


# Qwix ------------------------------------------------------------------------------------------


def _qwix_function(format: str, rule: str) -> Callable[[jax.Array], Any] | None:
    known = {
        ("mxfp8_e4m3", "rceil"): ("mxfp8", 32),
        ("mxfp4", "even"): ("mxfp4", 32),
        ("nvfp4", "amax"): ("nvfp4", 16),
    }
    if (format, rule) not in known:
        return None
    qwix = _import("qwix")
    qtype, block = known[format, rule]
    return jax.jit(lambda x: qwix.quantize(x, qtype, tiled_axes={x.ndim - 1: block}))


def _qwix_quantize(format: str, rule: str, x: jax.Array) -> Case | None:
    function = _qwix_function(format, rule)
    return None if function is None else Case("Qwix", lambda: function(x))


def _qwix_dequantize(format: str, rule: str, x: jax.Array) -> Case | None:
    function = _qwix_function(format, rule)
    if function is None:
        return None
    qwix, quantized = _import("qwix"), function(x)

    @jax.jit
    def dequantize(q):
        # Its dequantize works in the dtype of the scale.
        return qwix.dequantize(dataclasses.replace(q, scale=q.scale.astype(x.dtype)))

    return Case("Qwix", lambda: dequantize(quantized))


# torchao -----------------------------------------------------------------------------------------


def _torch() -> Any:
    torch = _import("torch")
    # A failure to compile is reported as a result, without its traceback of IR.
    logging.disable(logging.CRITICAL)
    warnings.filterwarnings("ignore", module="torch")
    torch.set_num_threads(usable_cores())
    return torch


def _as_tensor(torch: Any, x: jax.Array) -> Any:
    if x.dtype == jnp.bfloat16:
        return torch.from_numpy(np.array(x).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(x))


def _torchao_functions(torch: Any, format: str, rule: str, dtype: Any):
    """(quantize, dequantize) on tensors, or None; FP4 codes come out packed, two a byte."""
    if (format, rule) == ("nvfp4", "amax"):
        nv = _import("torchao.prototype.mx_formats.nvfp4_tensor").NVFP4Tensor

        def to_nvfp4(x):
            scale = x.abs().amax().float() / (448.0 * 6.0)
            return nv.to_nvfp4(x, per_tensor_scale=scale)

        return to_nvfp4, lambda q: q.dequantize(dtype)
    elements = {("mxfp8_e4m3", "rceil"): "float8_e4m3fn", ("mxfp4", "even"): "float4_e2m1fn_x2"}
    if (format, rule) not in elements:
        return None
    element = getattr(torch, elements[format, rule])
    mx = _import("torchao.prototype.mx_formats.mx_tensor")
    mode = _import("torchao.prototype.mx_formats.config").ScaleCalculationMode(rule)

    # Scales cross the boundary as bytes: inductor has no C++ type for float8_e8m0fnu.
    def to_mx(x):
        scale, codes = mx.to_mx(x, element, 32, mode)
        return scale.view(torch.uint8), codes

    def from_mx(q):
        return mx.to_dtype(q[1], q[0].view(torch.float8_e8m0fnu), element, 32, dtype)

    return to_mx, from_mx


def _torchao_case(
    compiled: bool, operation: str, format: str, rule: str, x: jax.Array
) -> Case | None:
    torch = _torch()
    data = _as_tensor(torch, x)
    functions = _torchao_functions(torch, format, rule, data.dtype)
    if functions is None:
        return None
    quantize, dequantize = functions
    function, argument = quantize, data
    if operation == "dequantize":
        function, argument = dequantize, quantize(data)
    if compiled:
        function = torch.compile(function, dynamic=False)
    name = f"torchao {'compiled' if compiled else 'eager'}"
    return Case(name, lambda: function(argument))


def _torchao(compiled: bool) -> Peer:
    def maker(operation: str) -> Maker:
        return lambda format, rule, x: _torchao_case(compiled, operation, format, rule, x)

    name = f"torchao {'compiled' if compiled else 'eager'}"
    return Peer(name, maker("quantize"), maker("dequantize"))


# torchmx -----------------------------------------------------------------------------------------


_TORCHMX = {
    "mxfp8_e4m3": "float8_e4m3",
    "mxfp6_e3m2": "float6_e3m2",
    "mxfp6_e2m3": "float6_e2m3",
    "mxfp4": "float4_e2m1",
    "mxint8": "int8",
}


def _torchmx_case(operation: str, format: str, rule: str, x: jax.Array) -> Case | None:
    """Whatever the rule: it has one of its own. It takes bfloat16 alone, and torchao 0.9."""
    if format not in _TORCHMX or x.dtype != jnp.bfloat16:
        return None
    torch = _torch()
    tensor, dtypes = _import("torchmx.mx_tensor").MXTensor, _import("torchmx.dtypes")
    element, data = getattr(dtypes, _TORCHMX[format]), _as_tensor(torch, x)
    if operation == "quantize":
        return Case("torchmx", lambda: tensor.to_mx(data, element, 32))
    quantized = tensor.to_mx(data, element, 32)
    return Case("torchmx", lambda: quantized.to_dtype(torch.bfloat16))


PEERS: tuple[Peer, ...] = (
    Peer("jax.nn", _jax_nn_quantize, _jax_nn_dequantize),
    Peer("Qwix", _qwix_quantize, _qwix_dequantize),
    _torchao(compiled=False),
    _torchao(compiled=True),
    Peer(
        "torchmx",
        functools.partial(_torchmx_case, "quantize"),
        functools.partial(_torchmx_case, "dequantize"),
    ),
)
