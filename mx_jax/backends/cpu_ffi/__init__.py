"""Handlers in C++ for the CPU, through XLA's FFI; without the library all calls are rejected."""

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
from mx_jax.backends.cpu_ffi import library
from mx_jax.backends.target import Backend, Late, Offer, Target
from mx_jax.codecs.explicit_axes import has_explicit_axes

_casts, _products, _weights = (
    Late(f"{__name__}.{name}") for name in ("casts", "products", "weights")
)


def _offer(
    call: type[Call], module: Late, handler: str, rejects: str, run: str, label: str = ""
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
        name: str = getattr(module, handler)
        if name not in loaded.targets:
            return f"was built without {name}; build it again"
        return getattr(module, rejects)(call)

    return Offer(
        call=call,
        rejects=rejects_on,
        run=lambda *operands: getattr(module, run)(*operands),
        label=label and (lambda call: getattr(module, label)(call)),
        takes_keys=True,
    )


# Quantize and multiply in `custom_calls/`, by the widest vectors that the machine has.
CPU_FFI = Backend(
    name="cpu_ffi",
    epsilon_bound=2.0,
    table=(
        # Products say where it is XLA's dot that multiplies.
        _offer(MatmulCall, _products, "MATMUL", "rejects", "multiply", "describe"),
        _offer(RaggedCall, _products, "MATMUL", "rejects_groups", "multiply_groups", "describe"),
        _offer(QuantizeCall, _casts, "QUANTIZE", "rejects_quantize", "quantize"),
        _offer(QuantizeBothCall, _casts, "QUANTIZE_BOTH", "rejects_both", "quantize_both"),
        _offer(DequantizeCall, _casts, "DEQUANTIZE", "rejects_dequantize", "dequantize"),
        _offer(PackCall, _weights, "TARGET", "rejects_pack", "pack"),
        _offer(AttendCall, _products, "ATTEND", "rejects_attention", "attend"),
        _offer(RandomBitsCall, _casts, "RANDOM_BITS", "rejects_random_bits", "draw_bits"),
        _offer(TransformCall, _casts, "TRANSFORM", "rejects_transform", "transform"),
        _offer(CastStatisticsCall, _casts, "STATISTICS", "rejects_statistics", "cast_statistics"),
    ),
)
