"""Calls as JAX primitives: one equation each in a jaxpr, whose backend is selected when lowered.

Lowering knows what tracing cannot: the platform of the program, and its number of devices. The
equation carries the call, what contexts say of selection, and what is known of the machine.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType

from mx_jax.backends import calls
from mx_jax.backends import target as machine
from mx_jax.backends.calls import Call, MatmulCall, QuantizeBothCall, QuantizeCall
from mx_jax.backends.reference import REFERENCE
from mx_jax.backends.select import Choice, find, select
from mx_jax.backends.target import SelectionContext, Target
from mx_jax.codecs.explicit_axes import vary_alike
from mx_jax.codecs.lowering import PLATFORMS, devices_sharing, eager
from mx_jax.codecs.rounding import DerivedKey
from mx_jax.packed import PackedMXArray, PackedRows, Rows, unpacked

# Calls whose results are codes and integers: no derivative reaches through them.
_NON_DIFFERENTIABLE = (
    QuantizeCall,
    QuantizeBothCall,
    calls.CastStatisticsCall,
    calls.RandomBitsCall,
)


def bind(call: Call, *operands: Any, sources: Callable[[], Sequence[Any]] | None = None) -> Any:
    """The results of a call, as one equation: its backend is selected when it is lowered.

    Args:
      call: a description of what is computed.
      operands: as `Offer.run` takes them.
      sources: of a product, what each operand's codes were cast from, and how: for TPUs, which
        multiply values. The derivative of the product is linked outside.

    Raises:
      ValueError: if the backend that `only_backend` names rejects the call.
    """
    context = SelectionContext.capture()
    target = context.target
    assert target is not None
    if sources is not None and target.platform == "tpu":
        call, operands = _with_sources(call, operands, sources())
    if context.only is not None or context.preferred or context.added:
        # What a name alone would reject is an error here.
        one = call
        if isinstance(call, QuantizeBothCall) and find(call, target) is None:
            one = call.first
        select(one, target)
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in mesh.axis_types:
        # Types would have to say where results lie: plain JAX's do.
        return _compute(call, target, *operands)
    leaves, tree = jax.tree.flatten(operands)
    if mesh.manual_axes:
        leaves = vary_alike(leaves)
    shapes = tuple((x.shape, x.dtype) for x in map(jax.typeof, leaves))
    types, result = _result(call, tree, shapes)
    work = Work(call=call, context=context, tree=tree, types=types)
    return jax.tree.unflatten(
        result, _primitive(_NAMES.get(type(call), "mx_call")).bind(*leaves, work=work)
    )


def _can_split(call: Call, target: Target) -> bool:
    """`partition.can_split`; it is imported where several devices share a call."""
    from mx_jax.backends import partition

    return partition.can_split(call, target)


def _of_a_part(call: Call, target: Target) -> Choice | None:
    """The backend that computes one device's part of a call that the compiler splits, if any."""
    choice = find(call, dataclasses.replace(target, num_devices=1))
    return choice if choice is not None and choice.offer.takes_parts else None


@dataclasses.dataclass(frozen=True, repr=False)
class Work:
    """The static parameter of an equation.

    Attributes:
      call: what is computed.
      context: what selection is told besides: the machine, as far as tracing knows it.
      tree: of the operands, whose leaves are the equation's.
      types: (shape, dtype) of the results, before any batch.
      batches: for each `vmap`, the innermost first, its size and the batched axis of each leaf.
    """

    call: Call
    context: SelectionContext
    tree: Any
    types: tuple[tuple[Any, Any], ...]
    batches: tuple[tuple[Any, tuple[int | None, ...]], ...] = ()

    def __repr__(self) -> str:
        assert not isinstance(self.call, calls.PackCall | calls.ValuesCall), "no equation"
        return self.call.text

    def compute(self, how: Callable[..., Any], *leaves: jax.Array) -> list[jax.Array]:
        """The results' leaves; `how` is given the call and its operands."""

        def compute(*leaves: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(how(self.call, *jax.tree.unflatten(self.tree, leaves)))

        for _, axes in self.batches:
            compute = jax.vmap(compute, axes)
        return compute(*leaves)

    def part(self, call: Call, target: Target) -> Choice | None:
        """The backend of each device's part of a call, where it is selected by parts."""
        is_split = target.num_devices > 1 and _can_split(call, target)
        return _of_a_part(call, target) if is_split else None

    def answers(self, num_devices: int = 1) -> list[tuple[Call, Target, Choice]]:
        """Each call of the equation, the machine, and the backend that lowering would select.

        Args:
          num_devices: of the program, where tracing did not count them.

        Raises:
          ValueError: as `select`.
        """
        call, target = self.call, self.context.target
        assert target is not None
        if not target.counted:
            target = _on(target, self.context, num_devices, num_devices)
        if isinstance(call, MatmulCall):
            # Values and codes of the same casts are multiplied by the same backend.
            lhs, rhs = (dataclasses.replace(side, source=None) for _, side in call.sides)
            call = dataclasses.replace(call, lhs=lhs, rhs=rhs)
        answers = []
        with dataclasses.replace(self.context, target=target).restore():
            single: tuple[Call, ...] = (call,)
            if isinstance(call, QuantizeBothCall):
                is_split = target.num_devices > 1 and self.context.only is None
                if is_split or find(call, target) is None:
                    single = call.first, call.second
            for one in single:
                part = self.part(one, target)
                choice = select(one, target) if part is None else part
                packed_by = getattr(getattr(one, "rhs", None), "packed_by", None)
                if part is not None:
                    choice = part.noting("codes move between devices")
                if packed_by is not None and (part or packed_by != choice.backend.name):
                    note = f"weights packed for {packed_by} are unpacked at every call"
                    choice = choice.noting(note)
                answers.append((one, target, choice))
        return answers


def _on(
    target: Target, context: SelectionContext, num_devices: int, program_devices: int
) -> Target:
    """A machine with the devices of a program; under `only_backend` calls are taken as they are."""
    return dataclasses.replace(
        target,
        num_devices=num_devices if context.only is None else 1,
        program_devices=program_devices,
        counted=True,
    )


# How a call is computed ---------------------------------------------------------------------------


def _with_sources(
    call: Any, operands: tuple[Any, ...], sources: Sequence[Any]
) -> tuple[Any, tuple[Any, ...]]:
    """A product and its operands, with their sources behind them."""
    if not any(sources):
        return call, operands
    values, (left, right) = ([None if x is None else x[i] for x in sources] for i in range(2))
    lhs, rhs = (
        dataclasses.replace(side, source=source)
        for (_, side), source in zip(call.sides, (left, right), strict=True)
    )
    return dataclasses.replace(call, lhs=lhs, rhs=rhs), (*operands, tuple(values))


def _of_values(
    compute: Callable[..., Any], target: Target, call: MatmulCall, *operands: Any
) -> Any:
    """A product with sources behind its operands: of their values, where a backend casts to those.

    Codes that nothing else reads are then computed in vain, and XLA leaves them out.
    """
    sides, lifted = [], 0
    for (_, side), operand, source in zip(call.sides, operands[:2], operands[2], strict=True):
        plain = dataclasses.replace(side, source=None)
        if side.source is not None and (choice := find(side.source, target)) is not None:
            operand = choice.offer.run(source, side.source)
            plain, lifted = calls.OperandType.of(operand, side.axes), lifted + calls.HEADROOM
        sides.append((plain, operand))
    (left, lhs), (right, rhs) = sides
    dtype = np.dtype(np.float32) if lifted else call.out_dtype
    product = compute(dataclasses.replace(call, lhs=left, rhs=right, out_dtype=dtype), lhs, rhs)
    return (product * 2.0**lifted).astype(call.out_dtype) if lifted else product


def _each(compute: Callable[..., Any], call: QuantizeBothCall, *operands: Any) -> Any:
    """Two casts, one after the other."""
    x, (first, second), tensor_scale = operands
    casts = ((call.first, first), (call.second, second))
    results = []
    for name, (cast, bits) in zip(("first", "second"), casts, strict=True):
        with jax.named_scope(name):
            results.append(compute(cast, x, bits, tensor_scale))
    return tuple(results)


def _compute(call: Call, target: Target, *operands: Any) -> Any:
    """The results of a call, by the backend that takes it on a machine."""
    if isinstance(call, MatmulCall) and len(operands) > 2:
        return _of_values(lambda plain, *x: _compute(plain, target, *x), target, call, *operands)
    choice = find(call, target)
    if choice is None and isinstance(call, QuantizeBothCall):
        return _each(lambda single, *x: _compute(single, target, *x), call, *operands)
    choice = select(call, target) if choice is None else choice

    def draw(bits: calls.RandomBitsCall, key: DerivedKey) -> Any:
        drawn = select(bits, target)
        keeps = choice.offer.takes_keys and drawn.backend is choice.backend
        return key if keeps else drawn.offer.run(key, bits)

    operands = _drawn(call, draw, *operands)
    if isinstance(call, calls.AttendCall) and choice.backend is REFERENCE:
        # A handler may decode what none attends to.
        queries, *rows, position = operands
        operands = (queries, *(_decoded(x, target) for x in rows), position)
    if isinstance(call, MatmulCall | calls.RaggedCall):
        lhs, rhs, *rest = operands
        if isinstance(rhs, PackedMXArray) and rhs.backend != choice.backend.name:
            why = dict(choice.rejections).get(rhs.backend, "it is not asked here")
            reason = f"{choice.backend.name} takes this product ({rhs.backend}: {why})"
            call, rhs = calls.unpacked_for(call, rhs, reason)
            operands = (lhs, rhs, *rest)
    return choice.offer.run(*operands, call)


def _decoded(rows: Rows, target: Target) -> jax.Array:
    """Rows of a cache as values."""
    if not isinstance(rows, PackedRows):
        return rows
    x = rows.unpacked()
    return _compute(calls.DequantizeCall.of(x, x.dtype), target, x)


def _drawn(call: Call, draw: Callable[..., Any], *operands: Any) -> tuple[Any, ...]:
    """The operands with random bits in place of keys."""
    if isinstance(call, QuantizeBothCall):
        x, pair, tensor_scale = operands
        each = zip((call.first, call.second), pair, strict=True)
        return x, tuple(_drawn(one, draw, x, bits)[1] for one, bits in each), tensor_scale
    if isinstance(call, QuantizeCall | calls.TransformCall) and isinstance(operands[1], DerivedKey):
        x, key, *rest = operands
        return x, draw(call.drawn_by(key), key), *rest
    return operands


@dataclasses.dataclass(frozen=True)
class OnOneDevice:
    """Computes the part of a call that one device has, selected for the part's own sizes."""

    context: SelectionContext
    target: Target

    def __call__(self, call: Call, *operands: Any) -> Any:
        """The results of a call, its operands behind it."""
        target = dataclasses.replace(self.target, num_devices=1)
        context = dataclasses.replace(self.context, target=target)
        with context.restore(), target.lowering(on_one_device=True):
            # No kernel of Pallas for GPUs has been seen inside a partitioned call.
            part = _of_a_part(call, target)
            return _compute(call, self.target if part is None else target, *operands)


def _plain(call: Call, *operands: Any) -> Any:
    """The same in plain JAX, which can be differentiated."""
    if isinstance(call, QuantizeBothCall):
        return _each(_plain, call, *operands)
    operands = _drawn(call, lambda bits, key: REFERENCE.run(bits, key), *operands)
    # Sources behind them change nothing.
    operands = operands[:2] if isinstance(call, MatmulCall) else operands
    return REFERENCE.run(call, *map(unpacked, operands))


# The primitives -----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _result(call: Call, tree: Any, shapes: Any) -> Any:
    """Types of a call's results and their tree, by arithmetic where the call tells them."""
    leaves = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    operands = jax.tree.unflatten(tree, leaves)
    result = calls.result_of(call, *operands)
    if result is None:
        result = jax.eval_shape(functools.partial(_plain, call), *operands)
    types, result_tree = jax.tree.flatten(result)
    return tuple((x.shape, jnp.dtype(x.dtype)) for x in types), result_tree


_NAMES: dict[type[Call], str] = {
    **dict.fromkeys((MatmulCall, calls.RaggedCall), "mx_matmul"),
    **dict.fromkeys((QuantizeCall, QuantizeBothCall), "mx_quantize"),
}


@functools.cache
def _primitive(name: str) -> Any:
    """A primitive with its rules, which are the same for all calls."""
    p: Any = Primitive(name)
    p.multiple_results = True
    # Newest JAX asks this of every primitive whose implementations may have custom rules.
    p.is_high = lambda *types, **params: False
    p.def_abstract_eval(_types)
    p.def_impl(functools.partial(eager, p))
    batching.primitive_batchers[p] = functools.partial(_batch, p)
    ad.primitive_jvps[p] = functools.partial(_jvp, p)
    for platform in PLATFORMS:
        rule = functools.partial(_lower, platform)
        # JAX lowers equal equations of a program once; not inlined, they call one function.
        mlir.register_lowering(p, rule, platform=platform, inline=False)
    return p


def _types(*types: Any, work: Work) -> list[Any]:
    # `result_aval`, written out: every equation passes here, and need not enter another file.
    like, sizes = types[0], tuple(size for size, _ in reversed(work.batches))
    return [
        like.update(
            shape=(*sizes, *shape),
            dtype=dtype,
            weak_type=False,
            sharding=like.sharding.update(spec=(None,) * (len(sizes) + len(shape))),
        )
        for shape, dtype in work.types
    ]


def _batch(p: Any, leaves: Sequence[jax.Array], axes: Sequence[int | None], *, work: Work) -> Any:
    size = next(x.shape[axis] for x, axis in zip(leaves, axes, strict=True) if axis is not None)
    axes = tuple(None if axis is None else int(axis) for axis in axes)
    wider = dataclasses.replace(work, batches=(*work.batches, (size, axes)))
    results = p.bind(*leaves, work=wider)
    return results, [0] * len(results)


def _jvp(p: Any, primals: Sequence[Any], tangents: Sequence[Any], *, work: Work) -> Any:
    if isinstance(work.call, _NON_DIFFERENTIABLE):
        # Codes do not change with values: a straight-through gradient is linked outside.
        results = p.bind(*primals, work=work)
        return results, [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
    # Kernels have no derivatives; plain JAX has.
    tangents = tuple(map(ad.instantiate_zeros, tangents))
    return jax.jvp(functools.partial(work.compute, _plain), tuple(primals), tangents)


def _lower(platform: str, ctx: Any, *values: Any, work: Work) -> Any:
    axis_context = ctx.module_context.axis_context
    devices = devices_sharing(axis_context)
    context, known = work.context, work.context.target
    assert known is not None
    if known.platform != platform:
        # A backend that is named alone is named for the platform that the trace is for.
        context, known = dataclasses.replace(context, only=None), machine.of_platform(platform)
    # Below shard_map each device has calls of its own; the mesh tells how many there are.
    program_devices = getattr(getattr(axis_context, "mesh", None), "size", devices)
    target = _on(known, context, devices, program_devices)
    context = dataclasses.replace(context, target=target)
    shown = None if devices == 1 else machine.show_devices(ctx, platform)
    is_split = shown is not None and target.num_devices > 1
    on_each = OnOneDevice(context, target)

    def how(call: Call, *operands: Any) -> Any:
        if isinstance(call, MatmulCall) and len(operands) > 2:
            return _of_values(how, target, call, *operands)
        if isinstance(call, QuantizeBothCall) and (is_split or find(call, target) is None):
            # Equal casts of a program share their lowering, as equations; and each may be split
            # along other axes, as its product is.
            return _each(bind, call, *operands)
        if devices > 1:
            # By its key a kernel would draw the same for each device's part.
            operands = _drawn(call, lambda bits, key: _compute(bits, target, key), *operands)
        if not is_split:
            return _compute(call, target, *operands)
        from mx_jax.backends import partition

        if isinstance(call, MatmulCall) and _can_split(call, target):
            return partition.multiply(on_each, call, *operands)
        # Without it XLA's own partition moves values where blocks are cut.
        if isinstance(call, QuantizeCall) and work.part(call, target) is not None:
            return partition.quantize(on_each, call, *operands)
        return _compute(call, target, *operands)

    with context.restore(), target.lowering(on_one_device=devices == 1):
        # Not a partial: JAX reads the signature of what it traces, slowly if it is one.
        lower = mlir.lower_fun(lambda *leaves: work.compute(how, *leaves), multiple_results=True)
        return lower(shown or ctx, *values)
