"""Casts on a GPU, beside plain JAX and a copy of the same array."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import mx_jax
from benchmarks.gpu_compare import PLAIN, Comparison, Repeated, chain_of, copies_beyond_cache
from benchmarks.gpu_products import KERNEL
from benchmarks.timing import Case
from mx_jax.backends.calls import QuantizeBothCall
from mx_jax.backends.pallas_gpu import PALLAS_GPU
from mx_jax.backends.reference import REFERENCE
from mx_jax.formats import BlockFormat
from mx_jax.testing.cases import QuantizeCase

COPY = "copy"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cast:
    """A cast of a tensor, with blocks along one axis or in one call along two, from the end."""

    format: BlockFormat
    axes: tuple[int, ...]
    shape: tuple[int, int]
    dtype: str = "bfloat16"

    @property
    def bits(self) -> float:
        """Of what is cast."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize * 8

    @property
    def bytes_moved(self) -> float:
        """Each element read once, and all codes and scales written; a code takes a byte."""
        x = jax.ShapeDtypeStruct(self.shape, self.dtype)
        written = jax.eval_shape(
            lambda x: [mx_jax.quantize(x, self.format, axis=axis) for axis in self.axes], x
        )
        of_results = sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(written))
        return self.bits / 8 + of_results

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        facts = {"format": self.format.name, "axes": self.axes}
        return facts | {"shape": self.shape, "dtype": self.dtype}

    def __str__(self) -> str:
        along = " and ".join({-1: "rows", -2: "columns"}[axis] for axis in self.axes)
        what = f"{self.dtype} to {self.format.name}, blocks along {along}"
        return f"{what}, {' x '.join(map(str, self.shape))}"

    def by_kernel(self, x: jax.Array) -> Any:
        """By one kernel."""
        calls = self._calls()
        if len(calls) == 1:
            return PALLAS_GPU.run(calls[0], x, None, None)
        both = QuantizeBothCall(first=calls[0], second=calls[1])
        return PALLAS_GPU.run(both, x, (None, None), None)

    def by_plain_jax(self, x: jax.Array) -> Any:
        """By the reference's code, one cast after the other."""
        found = [REFERENCE.run(call, x, None, None) for call in self._calls()]
        return found[0] if len(found) == 1 else tuple(found)

    def _calls(self) -> list[Any]:
        facts = {"format": self.format, "shape": self.shape, "dtype": self.dtype}
        return [QuantizeCase(axis=axis, **facts).call for axis in self.axes]


def compare_casts(cast: Cast, calls: int, copies: int | None = None) -> Comparison:
    """A cast by the kernel, whose bits must be the reference's, by plain JAX, and a copy.

    Args:
      cast: of one axis or two.
      calls: of the chain, in one sample.
      copies: of what is cast; None: more than any cache holds.
    """
    copies = copies_beyond_cache(cast.bits) if copies is None else copies
    plain = jax.jit(cast.by_plain_jax)

    @functools.cache
    def arrays() -> list[jax.Array]:
        draw = jax.jit(lambda key: jax.random.normal(key, cast.shape, jnp.dtype(cast.dtype)))
        return [draw(key) for key in jax.random.split(jax.random.key(0), copies)]

    def maker(name: str, one: Callable[[jax.Array], Any]) -> tuple[str, Callable[[], Case]]:
        def make() -> Case:
            way = Repeated(one=lambda _, x: one(x), x=jnp.int32(0), copies=arrays())
            case = chain_of(name, way, calls)
            pairs = (case.run(), [plain(x) for x in arrays()]) if name == KERNEL else ((), ())
            if not all(map(jnp.array_equal, *map(jax.tree.leaves, pairs))):
                raise ArithmeticError(f"{name} is wrong: it gives other bits than the reference")
            return case

        return name, make

    return Comparison(
        what=cast,
        makers=[
            # Not x + 0, which XLA knows to be x.
            maker(COPY, lambda x: -x),
            maker(PLAIN, cast.by_plain_jax),
            maker(KERNEL, cast.by_kernel),
        ],
        baseline=COPY,
        count=copies * calls,
        worth=cast.bytes_moved / (2 * cast.bits / 8),
    )
