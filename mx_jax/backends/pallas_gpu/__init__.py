"""Block-scaled products on GPUs by Pallas kernels (Mosaic GPU).

Optional: where JAX is too old or the GPU another, every call is rejected with that reason. Nothing
here imports Mosaic GPU before a call is taken.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mx_jax.axes import Side
from mx_jax.backends import calls
from mx_jax.backends.calls import Call, rejects_symbolic
from mx_jax.backends.target import Backend, Late, Offer, Target

if TYPE_CHECKING:
    from mx_jax.backends.pallas_gpu.architecture import Architecture

_products, _rejections = (Late(f"{__name__}.{name}") for name in ("products", "rejections"))


def _offer(
    call: type[Call],
    rejects: str,
    run: Callable[..., Any],
    *,
    trace_in_place: bool = False,
    partitioned: bool = False,
    lays_out: Callable[[Any], Side | None] = lambda call: None,
) -> Offer:
    """A kind of call, taken if its sizes are constant, and by one device unless partitioned."""

    def reason(call: Call, target: Target) -> str | None:
        if target.platform != "cuda":
            return f"runs on platform=cuda, got platform={target.platform}"
        rejection = rejects_symbolic(call) or getattr(_rejections, rejects)(call, target)
        if rejection or partitioned or target.num_devices == 1:
            return rejection
        # XLA would gather a kernel's operands, and each device do all of the work.
        return (
            "runs on one device or below jax.shard_map: jit does not split a kernel, got "
            f"num_devices={target.num_devices}; only_backend('pallas_gpu') insists"
        )

    return Offer(
        call=call,
        rejects=reason,
        run=run,
        lays_out=lays_out,
        trace_in_place=trace_in_place,
        takes_parts=False,
    )


def backend_for(architecture: "Architecture | None" = None, interpret: object = None) -> Backend:
    """Weights decoded on their way to the tensor cores; on Blackwell, two operands as they are.

    Args:
      architecture: the GPU, for tests; None: that of the machine it is for.
      interpret: parameters of Mosaic's interpreter, for tests on a CPU; None compiles.
    """

    def lays_out_groups(call: calls.RaggedCall) -> Side | None:
        return None if call.contracts_rows or call.rhs.packed_by is not None else "rhs"

    offer = functools.partial(_offer, trace_in_place=interpret is not None)
    how = {"architecture": architecture, "interpret": interpret}
    return Backend(
        name="pallas_gpu",
        epsilon_bound=4.0,
        table=(
            offer(
                calls.MatmulCall,
                "rejects",
                lambda *operands: _products.scaled_matmul(*operands, **how),
                lays_out=lambda call: _products.lays_out(call, architecture=architecture),
            ),
            offer(
                calls.RaggedCall,
                "rejects_groups",
                lambda *operands: _products.ragged_dot(*operands, **how),
                lays_out=lays_out_groups,
            ),
            # Plain JAX, for products below a shard_map too.
            offer(
                calls.PackCall,
                "rejects_packing",
                lambda *operands: _products.pack_weights(*operands),
                partitioned=True,
            ),
        ),
    )


PALLAS_GPU = backend_for()
