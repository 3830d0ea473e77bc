"""One call of a compiled handler as JAX sees it: batched, and of open sizes.

Both follow from a string that names the axes of its operands and results. `*b` stands for any
number of batch axes, a number for an axis of that length. `k/32` counts the blocks of 32 along k,
`k/k` those that are whole. The handler takes axes in parentheses as one. `vmap` adds a batch axis
in front. Devices that share a call each compute all of it: `backends/partition.py` splits calls.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from mx_jax.codecs.blocks import num_blocks
from mx_jax.codecs.explicit_axes import result_aval, vary_alike
from mx_jax.codecs.lowering import eager
from mx_jax.formats import WHOLE, BlockSize

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]
Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Handler:
    """A compiled handler, with all that a call knows but shapes."""

    target: str  # the name that it is registered by
    axes: str  # of the operands and results
    dtypes: tuple[np.dtype, ...]  # of the results
    # The dtype's name is the first entry of an array: so they are hashable.
    attributes: tuple[tuple[str, object], ...]
    sizes: tuple[tuple[str, int], ...]  # of the axes that no operand has in full

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            name: np.array(value[1:], value[0]) if isinstance(value, tuple) else value
            for name, value in self.attributes
        }


def call(
    target: str,
    operands: Iterable[tuple[jax.Array | None, str]],
    results: Iterable[tuple[str, str | np.dtype]],
    *,
    attributes: Mapping[str, object],
    sizes: Mapping[str, int] | None = None,
) -> Arrays:
    """The results of a handler, by operands with their axes, of which None is left out.

    Results are named by axes and dtype; `sizes` are those of the axes that no operand has in full.
    """
    arrays, of_operands = zip(*((x, axes) for x, axes in operands if x is not None), strict=True)
    of_results, dtypes = zip(*results, strict=True)
    if jax.sharding.get_abstract_mesh().manual_axes:
        arrays = vary_alike(arrays)
    handler = Handler(
        target=target,
        axes=f"{', '.join(of_operands)} -> {', '.join(of_results)}",
        dtypes=tuple(map(np.dtype, dtypes)),
        attributes=tuple(
            (name, (value.dtype.name, *value.tolist()) if isinstance(value, np.ndarray) else value)
            for name, value in sorted(attributes.items())
        ),
        sizes=tuple((sizes or {}).items()),
    )
    return tuple(_HANDLER.bind(*arrays, handler=handler))


# Axes ---------------------------------------------------------------------------------------------


class Axis(NamedTuple):
    """A name or number; with a block size, it counts blocks."""

    name: str
    block: BlockSize | None


class Array(NamedTuple):
    """One operand or result."""

    batch: str  # letters of its batch
    groups: tuple[tuple[Axis, ...], ...]  # its other axes; the handler takes a group as one

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The same, one by one."""
        return tuple(chain(*self.groups))


@functools.lru_cache(maxsize=4096)
def parse(axes: str) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """The operands and the results that a string names."""

    def axis(text: str) -> Axis:
        name, _, size = text.partition("/")
        return Axis(name, None if not size else WHOLE if size == name else int(size))

    def array(text: str) -> Array:
        parts = re.findall(r"\*(\w+)|\(([^)]*)\)|([\w/]+)", text)
        groups = ([one] if one else group.split() for letters, group, one in parts if not letters)
        batch = "".join(letters for letters, _, _ in parts)
        return Array(batch, tuple(tuple(map(axis, group)) for group in groups))

    operands, results = (tuple(map(array, side.split(","))) for side in axes.split("->"))
    return operands, results


class Geometry:
    """The axes of a call's operands and results, with their lengths; of batches by letters."""

    def __init__(self, handler: Handler, shapes: Shapes):
        self.operands, self.results = parse(handler.axes)
        self.batches: dict[str, Shape] = {}
        self.sizes: dict[str, Any] = dict(handler.sizes)
        self.blocks: dict[str, BlockSize] = {}
        for array, shape in zip(self.operands, shapes, strict=True):
            num_batch = len(shape) - len(array.axes)
            if array.batch:
                self.batches[array.batch] = shape[:num_batch]
            for axis, length in zip(array.axes, shape[num_batch:], strict=True):
                if axis.block is None:
                    self.sizes[axis.name] = length
        for axis in chain(*(array.axes for array in (*self.operands, *self.results))):
            if axis.name.isdigit():
                self.sizes[axis.name] = int(axis.name)
            if axis.block is not None:
                self.blocks[axis.name] = axis.block
        for letters in {array.batch for array in self.results}:
            lengths = zip(*(self.batches[letter] for letter in letters), strict=True)
            self.batches[letters] = tuple(next((n for n in m if n != 1), 1) for m in lengths)

    def merge(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Operands as the handler takes them: each group of axes is one."""
        merged = []
        for array, x in zip(self.operands, arrays, strict=True):
            if any(len(group) != 1 for group in array.groups):
                batch = self.batches[array.batch]
                missing = [
                    -self.sizes[axis.name] % block
                    if len(group) > 1 and axis.block is None and isinstance(block, int)
                    else 0
                    for group in array.groups
                    for axis in group
                    for block in [self.blocks.get(axis.name)]
                ]
                if any(missing):
                    x = jnp.pad(x, [(0, 0)] * len(batch) + [(0, number) for number in missing])
                rest = iter(x.shape[len(batch) :])
                lengths = [math.prod([next(rest) for _ in group]) for group in array.groups]
                x = x.reshape(*batch, *lengths)
            merged.append(x)
        return merged

    def result_shapes(self) -> list[tuple[Shape, Shape]]:
        """Of each result, as the handler gives it, with groups of axes as one, and as it is."""
        shapes = []
        for array in self.results:
            groups = [
                [
                    self.sizes[axis.name]
                    if axis.block is None
                    else num_blocks(axis.block, self.sizes[axis.name])
                    for axis in group
                ]
                for group in array.groups
            ]
            batch = self.batches[array.batch]
            shapes.append(((*batch, *map(math.prod, groups)), (*batch, *chain(*groups))))
        return shapes


# The primitive ------------------------------------------------------------------------------------

_HANDLER: Any = Primitive("mx_cpu_ffi")
_HANDLER.multiple_results = True
_HANDLER.is_high = lambda *types, **params: False
_HANDLER.def_impl(functools.partial(eager, _HANDLER))


@_HANDLER.def_abstract_eval
def _types(*types: ShapedArray, handler: Handler) -> tuple[Any, ...]:
    shapes = Geometry(handler, tuple(x.shape for x in types)).result_shapes()
    every = zip(shapes, handler.dtypes, strict=True)
    return tuple(result_aval(types[0], shape, dtype) for (_, shape), dtype in every)


def _lower(ctx: mlir.LoweringRuleContext, *values: mlir.ir.Value, handler: Handler) -> Any:
    avals: tuple[Any, ...] = tuple(ctx.avals_in)
    geometry = Geometry(handler, tuple(x.shape for x in avals))
    # Arrays that are as the handler takes them, of sizes that are known, need no more.
    lengths = (*geometry.sizes.values(), *chain(*geometry.batches.values()))
    groups = chain(*(array.groups for array in (*geometry.operands, *geometry.results)))
    if all(isinstance(n, int) for n in lengths) and all(len(group) == 1 for group in groups):
        return jax.ffi.ffi_lowering(handler.target)(ctx, *values, **handler.arguments)
    compute = functools.partial(_compute, handler)
    return mlir.lower_fun(compute, multiple_results=True)(ctx, *values)


# `Work` is what equal calls share: a function for each handler inside would be a second.
mlir.register_lowering(_HANDLER, _lower, platform="cpu", cacheable=False)


def _compute(handler: Handler, *operands: jax.Array) -> Arrays:
    """The handler on whole or local arrays: axes in parentheses become one."""
    geometry = Geometry(handler, tuple(operand.shape for operand in operands))
    shapes = geometry.result_shapes()
    like, every = jax.typeof(operands[0]), zip(shapes, handler.dtypes, strict=True)
    types = tuple(result_aval(like, merged, dtype) for (merged, _), dtype in every)
    results = jax.ffi.ffi_call(handler.target, types)(
        *geometry.merge(operands), **handler.arguments
    )
    return tuple(
        result if shape == merged else result.reshape(shape)
        for (merged, shape), result in zip(shapes, results, strict=True)
    )


def _batch(operands: Sequence[jax.Array], axes: Sequence[int | None], *, handler: Handler) -> Any:
    """One more batch axis in front; a batch that has none gets one of length one."""
    (size, *_) = [x.shape[a] for x, a in zip(operands, axes, strict=True) if a is not None]
    arrays, results = parse(handler.axes)
    wide = {array.batch for array, axis in zip(arrays, axes, strict=True) if axis is not None}
    for result in results:
        if wide.isdisjoint(result.batch):
            wide.add(result.batch[0])
    lifted = []
    for array, axis, operand in zip(arrays, axes, operands, strict=True):
        if axis is not None:
            operand = jnp.moveaxis(operand, axis, 0)
        elif array.batch:
            # What two batches give together is as long as the results.
            length = size if array.batch in wide or len(array.batch) > 1 else 1
            operand = jnp.broadcast_to(operand, (length, *operand.shape))
        lifted.append(operand)
    return _HANDLER.bind(*lifted, handler=handler), (0,) * len(results)


batching.primitive_batchers[_HANDLER] = _batch
