"""Casts on a GPU, beside plain JAX and a copy of the same array."""

import functools
import math
from collections.abc import Callable

import jax

import mx_jax
from benchmarks.gpu_compare import Comparison, chain_of
from benchmarks.gpu_products import KERNEL
from benchmarks.timing import Case
from mx_jax.backends.pallas_gpu import PALLAS_GPU
from mx_jax.measure import worker
from mx_jax.measure.cases import Case as Cast
from mx_jax.measure.cases import copy_bits
from mx_jax.measure.timing import copies_beyond_cache

COPY = "copy"
# What `mx_jax.measure` calls them.
_WAYS = {COPY: worker.BFLOAT16, worker.PLAIN: worker.PLAIN, KERNEL: worker.KERNEL}


def compare_casts(cast: Cast, calls: int, copies: int | None = None) -> Comparison:
    """A cast by the kernel, whose bits must be the reference's, by plain JAX, and a copy.

    Args:
      cast: of one axis or two.
      calls: of the chain, in one sample.
      copies: of what is cast; None: more than any cache holds.
    """
    copies = copies_beyond_cache(copy_bits(cast)) if copies is None else copies
    made = functools.cache(lambda: worker.subject(cast, PALLAS_GPU, copies))

    def maker(name: str) -> Callable[[], Case]:
        def make() -> Case:
            case = chain_of(name, made().ways[_WAYS[name]], calls)
            if name == KERNEL and made().error(case.run()) > 0:
                raise ArithmeticError(f"{name} is wrong: it gives other bits than the reference")
            return case

        return make

    return Comparison(
        what=cast,
        makers=[(name, maker(name)) for name in _WAYS],
        baseline=COPY,
        count=copies * calls,
        worth=bytes_moved(cast) / (2 * copy_bits(cast) / 8),
    )


def bytes_moved(cast: Cast) -> float:
    """Each element read once, and all codes and scales written; a code takes a byte."""
    x = jax.ShapeDtypeStruct(cast.shape, cast.dtype)
    ways = list(zip(cast.formats, cast.axes, strict=True))
    written = jax.eval_shape(lambda x: [mx_jax.quantize(x, f, axis=a) for f, a in ways], x)
    of_results = sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(written))
    return copy_bits(cast) / 8 + of_results
