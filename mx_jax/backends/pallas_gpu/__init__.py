"""Products by packed weights on Hopper GPUs by a Pallas kernel (Mosaic GPU).

Optional: where JAX is too old or the GPU another, every call is rejected with that reason. Nothing
here imports Mosaic GPU before a call is taken.
"""

from collections.abc import Callable
from typing import Any

from mx_jax.backends import calls
from mx_jax.backends.calls import Call, rejects_symbolic
from mx_jax.backends.target import Backend, Late, Offer, Target

_products, _tiles = (Late(f"{__name__}.{name}") for name in ("products", "tiles"))


def backend_for(interpret: object = None) -> Backend:
    """Packed weights decoded on their way to the tensor cores.

    Args:
      interpret: parameters of Mosaic's interpreter, for tests on a CPU; None compiles.
    """

    def offer(call: type[Call], rejects: str, run: Callable[..., Any]) -> Offer:
        """A kind of call, taken if its sizes are constant; products by one device."""

        def reason(call: Call, target: Target) -> str | None:
            if target.platform != "cuda":
                return f"runs on platform=cuda, got platform={target.platform}"
            rejection = rejects_symbolic(call) or getattr(_tiles, rejects)(call, target)
            # Packing is plain JAX.
            if rejection or isinstance(call, calls.PackCall) or target.num_devices == 1:
                return rejection
            # XLA would gather a kernel's operands, and each device do all of the work.
            return (
                "runs on one device or below jax.shard_map: jit does not split a kernel, got "
                f"num_devices={target.num_devices}; only_backend('pallas_gpu') insists"
            )

        return Offer(call=call, rejects=reason, run=run, takes_parts=False)

    return Backend(
        name="pallas_gpu",
        epsilon_bound=4.0,
        table=(
            offer(
                calls.MatmulCall,
                "rejects",
                lambda *operands: _products.scaled_matmul(*operands, interpret),
            ),
            offer(
                calls.RaggedCall,
                "rejects_groups",
                lambda *operands: _products.ragged_dot(*operands, interpret),
            ),
            offer(
                calls.PackCall,
                "rejects_packing",
                lambda *operands: _products.pack_weights(*operands),
            ),
        ),
    )


PALLAS_GPU = backend_for()
