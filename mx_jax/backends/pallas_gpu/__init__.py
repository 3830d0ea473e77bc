"""Block-scaled products and casts on GPUs by Pallas kernels (Mosaic GPU).

Optional: where JAX is too old or the GPU another, every call is rejected with that reason. Nothing
here imports Mosaic GPU before a call is taken.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mx_jax.axes import Side
from mx_jax.backends.calls import (
    Call,
    MatmulCall,
    PackCall,
    QuantizeBothCall,
    QuantizeCall,
    RaggedCall,
    rejects_symbolic,
)
from mx_jax.backends.pallas_gpu import products, quantize, rejections
from mx_jax.backends.pallas_gpu.architecture import Architecture, architecture_of
from mx_jax.backends.target import Backend, Offer, Target


def _offer(
    call: type[Call],
    rejects: Callable[[Any, Target], str | None],
    run: Callable[..., Any],
    *,
    partitioned: bool = False,
    lays_out: Callable[[Any], Side | None] = lambda call: None,
) -> Offer:
    """A kind of call, taken if its sizes are constant, and by one device unless partitioned."""

    def reason(call: Any, target: Target) -> str | None:
        found = rejects_symbolic(call) or rejects(call, target)
        return found or (None if partitioned else rejections.rejects_devices(target))

    return Offer(inline=True, call=call, rejects=reason, run=run, lays_out=lays_out)


def _kernel(call: Call, target: Target, architecture: Architecture | None = None) -> str:
    """Which of the machine's kernels multiplies; the kernel that casts has no row."""
    if not isinstance(call, MatmulCall | RaggedCall):
        return "quantize"
    row = architecture or architecture_of(target.compute_capability)
    return "" if row is None else row.kernel(call.lhs.format, call.rhs.format).name


def backend_for(architecture: Architecture | None = None, interpret: object = None) -> Backend:
    """Weights decoded on their way to the tensor cores; on Blackwell, two operands as they are.

    Args:
      architecture: the GPU, for tests; None: that of the machine it is for.
      interpret: parameters of Mosaic's interpreter, for tests on a CPU; None compiles.
    """
    on = functools.partial(functools.partial, architecture=architecture)
    how = functools.partial(on, interpret=interpret)
    lays_out, in_groups = on(products.lays_out), products.lays_out_groups
    return Backend(
        name="pallas_gpu",
        epsilon_bound=4.0,
        table=(
            _offer(MatmulCall, rejections.rejects, how(products.scaled_matmul), lays_out=lays_out),
            _offer(
                RaggedCall, rejections.rejects_groups, how(products.ragged_dot), lays_out=in_groups
            ),
            _offer(QuantizeCall, quantize.rejects, how(quantize.quantize)),
            _offer(QuantizeBothCall, quantize.rejects, how(quantize.quantize_both)),
            # Plain JAX, for products below a shard_map too.
            _offer(PackCall, rejections.rejects_packing, products.pack_weights, partitioned=True),
        ),
        source=lambda: list(Path(__file__).parent.rglob("*.py")),
        kernel=on(_kernel),
    )


PALLAS_GPU = backend_for()
