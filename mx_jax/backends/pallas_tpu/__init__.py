"""Kernels for TPUs in Pallas: few rows by weights.

Nothing here has run on a TPU. libtpu compiles every kernel, Pallas' interpreter has its bits, and
what is on by default is faster by the schedule that libtpu makes: `benchmarks/results/tpu`.
Pallas is imported when a call is taken.
"""

from collections.abc import Callable
from typing import Any

from mx_jax.backends import calls
from mx_jax.backends.calls import Call, rejects_symbolic
from mx_jax.backends.pallas_tpu import casts, weights
from mx_jax.backends.target import Backend, Offer, Target

HOW = "faster by libtpu's schedule, not run"


def _rejects_place(target: Target) -> str | None:
    """Why a machine runs no kernel that jit would have to split."""
    if target.platform != "tpu":
        return f"needs platform=tpu, got platform={target.platform}"
    if target.num_devices > 1:
        return (
            "runs on one device or below jax.shard_map: jit does not split a kernel, got "
            f"num_devices={target.num_devices}"
        )
    return None


def offer(
    call: type[Call],
    rejects: Callable[[Any, Target], str | None],
    run: Callable[..., Any],
    *,
    interpret: bool = False,
) -> Offer:
    """A kind of call on one TPU, of constant sizes; on any machine where kernels are interpreted.

    Args:
      call: its type.
      rejects: further reasons.
      run: as `Offer.run`, with `interpret` behind the call.
      interpret: whether Pallas' interpreter runs the kernels.
    """

    def reason(call: Any, target: Target) -> str | None:
        place = None if interpret else _rejects_place(target)
        return place or rejects_symbolic(call) or rejects(call, target)

    def run_call(*given: Any) -> Any:
        return run(*given, interpret)

    return Offer(call=call, rejects=reason, run=run_call, how=HOW)


def _multiply(*given: Any) -> Any:
    from mx_jax.backends.pallas_tpu import columns

    return columns.multiply(*given)


def backend_for(*, interpret: bool = False) -> Backend:
    """The backend; for tests on a machine without a TPU, by Pallas' interpreter."""
    rows = (
        (calls.QuantizeCall, casts.rejects, casts.quantize),
        (calls.QuantizeBothCall, casts.rejects_both, casts.quantize_both),
        (calls.ValuesCall, casts.rejects_values, casts.values),
        (calls.MatmulCall, weights.rejects, _multiply),
        (calls.PackCall, weights.rejects_pack, weights.pack),
    )
    table = tuple(offer(*row, interpret=interpret) for row in rows)
    return Backend(name="pallas_tpu", epsilon_bound=2.0, table=table)


PALLAS_TPU = backend_for()
