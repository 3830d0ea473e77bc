"""Handlers in C++ for the CPU, through XLA's FFI; without the library all calls are rejected."""

from collections.abc import Callable
from typing import Any

from mx_jax.backends.calls import (
    AttendCall,
    Call,
    CastStatisticsCall,
    DequantizeCall,
    MatmulCall,
    PackCall,
    QuantizeBothCall,
    QuantizeCall,
    RaggedCall,
    RandomBitsCall,
    TransformCall,
)
from mx_jax.backends.cpu_ffi import casts, library, products, weights
from mx_jax.backends.target import Backend, Offer, Target
from mx_jax.codecs.explicit_axes import has_explicit_axes


def _offer(
    call: type[Call],
    handler: str,
    rejects: Callable[[Any], str | None],
    run: Callable[..., Any],
    label: str | Callable[[Any], str] = "",
) -> Offer:
    """A kind of call, by the library's handler of it, which may reject calls."""

    def rejects_on(call: Call, target: Target) -> str | None:
        if target.platform != "cpu":
            return f"runs on platform=cpu, got platform={target.platform}"
        if target.num_devices > 1 and target.counted and not isinstance(call, PackCall):
            # Shardings that cut a mesh axis in two, as reshapes make them, reach no custom call:
            # jax.experimental.custom_partitioning fails to name them. The reference takes any.
            return (
                "runs on one device: JAX cannot hand a custom call every sharding, got "
                f"num_devices={target.num_devices}; only_backend('cpu_ffi') insists"
            )
        if has_explicit_axes():
            return "takes no mesh with explicit axes: types would have to say where results lie"
        loaded = library.load()
        if isinstance(loaded, str):
            library.say_once(loaded)
            return loaded
        if handler not in loaded.targets:
            return f"was built without {handler}; build it again"
        return rejects(call)

    return Offer(call=call, rejects=rejects_on, run=run, label=label, takes_keys=True)


def _product(
    call: type[Call], rejects: Callable[[Any], str | None], run: Callable[..., Any]
) -> Offer:
    """A product, which says where it is XLA's dot that multiplies."""
    return _offer(call, products.MATMUL, rejects, run, products.describe)


# Quantize and multiply in `custom_calls/`, by the widest vectors that the machine has.
CPU_FFI = Backend(
    name="cpu_ffi",
    epsilon_bound=2.0,
    table=(
        _product(MatmulCall, products.rejects, products.multiply),
        _product(RaggedCall, products.rejects_groups, products.multiply_groups),
        _offer(QuantizeCall, casts.QUANTIZE, casts.rejects_quantize, casts.quantize),
        _offer(QuantizeBothCall, casts.QUANTIZE_BOTH, casts.rejects_both, casts.quantize_both),
        _offer(DequantizeCall, casts.DEQUANTIZE, casts.rejects_dequantize, casts.dequantize),
        _offer(PackCall, weights.TARGET, weights.rejects_pack, weights.pack),
        _offer(AttendCall, products.ATTEND, products.rejects_attention, products.attend),
        _offer(RandomBitsCall, casts.RANDOM_BITS, casts.rejects_random_bits, casts.draw_bits),
        _offer(TransformCall, casts.TRANSFORM, casts.rejects_transform, casts.transform),
        _offer(
            CastStatisticsCall, casts.STATISTICS, casts.rejects_statistics, casts.cast_statistics
        ),
    ),
)
