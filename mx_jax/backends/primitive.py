"""Calls as JAX primitives: one equation each in a jaxpr, whose backend is selected when lowered.

Lowering knows what tracing cannot: the platform of the program, and its number of devices. The
equation carries the call, what contexts ask of selection, and what is known of the machine.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType

from mx_jax.backends import calls, partition
from mx_jax.backends import select as selection
from mx_jax.backends import target as machine
from mx_jax.backends.calls import Call, MatmulCall, PackCall, QuantizeBothCall, QuantizeCall
from mx_jax.backends.reference import REFERENCE
from mx_jax.backends.select import Choice, find, select
from mx_jax.backends.target import Target
from mx_jax.codecs.explicit_axes import vary_alike
from mx_jax.codecs.lowering import eager, lowered_for, on_one_device
from mx_jax.codecs.rounding import DerivedKey
from mx_jax.packed import PackedMXArray, unpacked

# What codes and integers are the results of: no derivative reaches through them.
_SLOPELESS = (QuantizeCall, QuantizeBothCall, calls.CastStatisticsCall, calls.RandomBitsCall)
_DRAWS = (QuantizeCall, QuantizeBothCall, calls.TransformCall)


def bind(call: Call, *operands: Any, sources: Callable[[], Sequence[Any]] | None = None) -> Any:
    """What a call asks for, as one equation: who computes it is selected when it is lowered.

    Args:
      call: whatever is selected, it is not looked at here: that is what `choose` is for.
      operands: as `Offer.run` takes them.
      sources: of a product, what each operand's codes were cast from, and how: for TPUs, which
        multiply values. The derivative of the product is linked outside.

    Raises:
      ValueError: as `choose`.
    """
    target = machine.current_target()
    if sources is not None and target.platform == "tpu":
        call, operands = _with_sources(call, operands, sources())
    asked = Asked.here(target)
    # What a name alone would reject is an error here; what is named or added may run in place.
    is_told = asked.only is not None or asked.preferred or asked.added
    # Casts that are made one by one share their lowering with equal ones, as two equations.
    if is_told or (target.platform != "cpu" and isinstance(call, QuantizeBothCall)):
        choice = choose_if_any(call)
        if choice is None and isinstance(call, QuantizeBothCall):
            return _each(bind, call, *operands)
        return (select(call) if choice is None else choice).offer.run(*operands, call)
    return equation(asked, *operands, call)


def choose(call: Call) -> Choice:
    """The backend that takes a call here; `offer.run` binds the call as one equation.

    Raises:
      ValueError: if all reject, which happens only under `only_backend`; every reason is listed.
    """
    return choose_if_any(call) or select(call)


def choose_if_any(call: Call) -> Choice | None:
    """As `choose`, for calls that can be made of others: None if all that are asked reject."""
    target, choice = machine.current_target(), None
    if isinstance(call, MatmulCall) and compiler_splits() and partition.can_split(call, target):
        # A mesh in context says that the compiler splits the product: who computes the parts?
        choice = _of_a_part(call, dataclasses.replace(target, counted=True))
    choice = choice or find(call, target)
    if choice is None:
        return None
    offer = choice.offer
    run = offer.run
    # What a layout gives is a type of its own, and the effects of an interpreted kernel have to be
    # seen by JAX: both are traced in place.
    if not isinstance(call, PackCall) and not (offer.inline and target.counted):
        run = functools.partial(equation, Asked.here(target))
    elif isinstance(call, _DRAWS) and not offer.takes_keys:
        run = functools.partial(_with_drawn, run)
    return dataclasses.replace(choice, offer=dataclasses.replace(offer, run=run))


def _with_drawn(run: Callable[..., Any], *given: Any) -> Any:
    return run(*_drawn(given[-1], bind, *given[:-1]), given[-1])


def compiler_splits() -> bool:
    """Whether a mesh in context says that the compiler splits products between devices."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.size > 1 and set(mesh.axis_types) == {AxisType.Auto}


def _of_a_part(call: Call, target: Target) -> Choice | None:
    """The backend that computes one device's part of a call that the compiler splits, if any."""
    choice = find(call, dataclasses.replace(target, num_devices=1))
    return choice if choice is not None and choice.offer.takes_parts else None


@dataclasses.dataclass(frozen=True)
class Asked:
    """What contexts ask of selection where a call is bound: it may be lowered outside of them.

    Attributes:
      target: the machine, as far as tracing knows it.
      only: what `only_backend` names.
      preferred: what `prefer_backends` names.
      added: what `with_backends` adds.
    """

    target: Target
    only: str | None
    preferred: tuple[str, ...]
    added: tuple[Any, ...]

    @classmethod
    def here(cls, target: Target) -> "Asked":
        """What is asked in the contexts of the caller."""
        only, preferred = machine.only_named.value, selection.preferred_names.value
        return cls(target, only, preferred, selection.added_backends.value)

    @contextlib.contextmanager
    def on(self, target: Target) -> Iterator[None]:
        """The contexts, for a machine."""
        with (
            machine.only_named(self.only),
            selection.preferred_names(self.preferred),
            selection.added_backends(self.added),
            machine.use_target(target),
        ):
            yield


def equation(asked: Asked, *given: Any) -> Any:
    """What a call asks for, as one equation: the operands, the call last, as `Offer.run` has it."""
    *operands, call = given
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in mesh.axis_types:
        # Types would have to say where results lie: plain JAX's do.
        return _compute(call, machine.current_target(), *operands)
    leaves, tree = jax.tree.flatten(tuple(operands))
    if mesh.manual_axes:
        leaves = vary_alike(leaves)
    shapes = tuple((x.shape, x.dtype) for x in map(jax.typeof, leaves))
    types, result = _result(call, tree, shapes)
    work = Work(call=call, asked=asked, tree=tree, types=types)
    return jax.tree.unflatten(result, _primitive(type(call)).bind(*leaves, work=work))


@dataclasses.dataclass(frozen=True, repr=False)
class Work:
    """The static parameter of an equation.

    Attributes:
      call: what is computed.
      asked: what selection is asked besides.
      tree: of the operands, whose leaves are the equation's.
      types: (shape, dtype) of the results, before any batch.
      batches: for each `vmap`, the innermost first, its size and the batched axis of each leaf.
    """

    call: Call
    asked: Asked
    tree: Any
    types: tuple[tuple[Any, Any], ...]
    batches: tuple[tuple[Any, tuple[int | None, ...]], ...] = ()

    def __repr__(self) -> str:
        return self.call.text

    def compute(self, how: Callable[..., Any], *leaves: jax.Array) -> list[jax.Array]:
        """The results' leaves; `how` is given the call and its operands."""

        def compute(*leaves: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(how(self.call, *jax.tree.unflatten(self.tree, leaves)))

        for _, axes in self.batches:
            compute = jax.vmap(compute, axes)
        return compute(*leaves)


def _with_sources(
    call: Any, operands: tuple[Any, ...], sources: Sequence[Any]
) -> tuple[Any, tuple[Any, ...]]:
    """A product and its operands, with their sources behind them."""
    if not any(sources):
        return call, operands
    values, (left, right) = ([None if own is None else own[i] for own in sources] for i in range(2))
    lhs, rhs = (
        dataclasses.replace(own, source=source)
        for (_, own), source in zip(call.sides, (left, right), strict=True)
    )
    return dataclasses.replace(call, lhs=lhs, rhs=rhs), (*operands, tuple(values))


def _of_values(
    compute: Callable[..., Any], target: Target, call: MatmulCall, *operands: Any
) -> Any:
    """A product with sources behind its operands: of their values, where a backend casts to those.

    Codes that nothing else reads are then computed in vain, and XLA leaves them out.
    """
    sides, lifted = [], 0
    for (_, own), operand, source in zip(call.sides, operands[:2], operands[2], strict=True):
        plain = dataclasses.replace(own, source=None)
        if own.source is not None and (choice := find(own.source, target)) is not None:
            operand = choice.offer.run(source, own.source)
            plain, lifted = calls.OperandType.of(operand, own.axes), lifted + calls.HEADROOM
        sides.append((plain, operand))
    (left, lhs), (right, rhs) = sides
    dtype = np.dtype(np.float32) if lifted else call.out_dtype
    found = compute(dataclasses.replace(call, lhs=left, rhs=right, out_dtype=dtype), lhs, rhs)
    return (found * 2.0**lifted).astype(call.out_dtype) if lifted else found


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
    """What a call asks for, by the backend that takes it on a machine."""
    if isinstance(call, MatmulCall) and len(operands) > 2:
        return _of_values(
            lambda plain, *own: _compute(plain, target, *own), target, call, *operands
        )
    choice = find(call, target)
    if choice is None and isinstance(call, QuantizeBothCall):
        return _each(lambda single, *own: _compute(single, target, *own), call, *operands)
    choice = select(call, target) if choice is None else choice

    def draw(bits: calls.RandomBitsCall, key: DerivedKey) -> Any:
        drawn = select(bits, target)
        keeps = choice.offer.takes_keys and drawn.backend is choice.backend
        return key if keeps else drawn.offer.run(key, bits)

    operands = _drawn(call, draw, *operands)
    if isinstance(call, MatmulCall | calls.RaggedCall):
        lhs, rhs, *rest = operands
        if isinstance(rhs, PackedMXArray) and rhs.backend != choice.backend.name:
            rhs = rhs.unpack()
            call = dataclasses.replace(call, rhs=calls.OperandType.of(rhs, call.rhs.axes))
        operands = (lhs, rhs, *rest)
    return choice.offer.run(*operands, call)


def _drawn(call: Call, draw: Callable[..., Any], *operands: Any) -> tuple[Any, ...]:
    """The operands with what is drawn in place of keys."""
    if isinstance(call, QuantizeBothCall):
        x, pair, tensor_scale = operands
        each = zip((call.first, call.second), pair, strict=True)
        return x, tuple(_drawn(one, draw, x, own)[1] for one, own in each), tensor_scale
    if isinstance(call, QuantizeCall | calls.TransformCall) and isinstance(operands[1], DerivedKey):
        x, key, *rest = operands
        return x, draw(call.drawn_by(key), key), *rest
    return operands


@dataclasses.dataclass(frozen=True)
class OnOneDevice:
    """Computes the part of a call that one device has, selected for the part's own sizes."""

    asked: Asked
    target: Target

    def __call__(self, call: Call, *operands: Any) -> Any:
        """What a call asks for, its operands behind it."""
        target = dataclasses.replace(self.target, num_devices=1)
        with on_one_device(True), self.asked.on(target), lowered_for(target.units):
            # No kernel of Pallas for GPUs has been seen inside a partitioned call.
            part = _of_a_part(call, target)
            return _compute(call, self.target if part is None else target, *operands)


def answers(work: Work, num_devices: int = 1) -> list[tuple[Call, Target, Choice]]:
    """Each call of an equation, the machine, and the backend that lowering would select.

    Args:
      work: the equation's parameter.
      num_devices: of the program, where tracing did not count them.

    Raises:
      ValueError: as `select`.
    """
    call, asked, target = work.call, work.asked, work.asked.target
    if not target.counted:
        number = num_devices if asked.only is None else 1
        target = dataclasses.replace(
            target, num_devices=number, program_devices=num_devices, counted=True
        )
    is_split = target.num_devices > 1 and asked.only is None
    if isinstance(call, MatmulCall):
        # Values and codes of the same casts are multiplied by the same backend.
        lhs, rhs = (dataclasses.replace(own, source=None) for _, own in call.sides)
        call = dataclasses.replace(call, lhs=lhs, rhs=rhs)

    def answer(call: Call) -> Choice:
        can_split = is_split and partition.can_split(call, target)
        if can_split:
            part = _of_a_part(call, target)
            if part is not None:
                how = "; ".join(filter(None, (part.offer.how, "codes move between devices")))
                return dataclasses.replace(part, offer=dataclasses.replace(part.offer, how=how))
        return select(call, target)

    with asked.on(target):
        each = [call]
        if isinstance(call, QuantizeBothCall) and (is_split or find(call, target) is None):
            each = [call.first, call.second]
        return [(one, target, answer(one)) for one in each]


def _plain(call: Call, *operands: Any) -> Any:
    """The same in plain JAX, which can be differentiated."""
    if isinstance(call, QuantizeBothCall):
        return _each(_plain, call, *operands)
    operands = _drawn(call, lambda bits, key: REFERENCE.run(bits, key), *operands)
    # Sources behind them change nothing.
    operands = operands[:2] if isinstance(call, MatmulCall) else operands
    return REFERENCE.run(call, *map(unpacked, operands))


@functools.lru_cache(maxsize=4096)
def _result(call: Call, tree: Any, shapes: Any) -> Any:
    """Types of a call's results and their tree, by arithmetic where the call tells them."""
    leaves = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    operands = jax.tree.unflatten(tree, leaves)
    result = calls.result_of(call, *operands)
    if result is None:
        result = jax.eval_shape(functools.partial(_plain, call), *operands)
    found, result_tree = jax.tree.flatten(result)
    return tuple((x.shape, jnp.dtype(x.dtype)) for x in found), result_tree


@functools.cache
def _primitive(kind: type[Call]) -> Any:
    """The primitive of a kind of call, with its rules."""
    name = kind.__name__.removesuffix("Call")
    p: Any = Primitive("mx_" + "".join(f"_{c.lower()}" if c.isupper() else c for c in name)[1:])
    p.multiple_results = True
    # Newest JAX asks this of every primitive whose implementations may have custom rules.
    p.is_high = lambda *types, **params: False
    p.def_abstract_eval(_types)
    p.def_impl(functools.partial(eager, p))
    batching.primitive_batchers[p] = functools.partial(_batch, p)
    ad.primitive_jvps[p] = functools.partial(_jvp, p)
    for platform in machine.PLATFORMS:
        rule = functools.partial(_lower, platform)
        # JAX lowers equal equations of a program once; not inlined, they call one function.
        mlir.register_lowering(p, rule, platform=platform, inline=False)
    return p


def _types(*types: Any, work: Work) -> list[Any]:
    # `result_type`, written out: every equation passes here, and need not enter another file.
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
    if isinstance(work.call, _SLOPELESS):
        # Codes do not change with values: a straight-through gradient is linked outside.
        results = p.bind(*primals, work=work)
        return results, [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
    # Kernels have no derivatives; plain JAX has.
    tangents = tuple(map(ad.instantiate_zeros, tangents))
    return jax.jvp(functools.partial(work.compute, _plain), tuple(primals), tangents)


def _lower(platform: str, ctx: Any, *values: Any, work: Work) -> Any:
    context = ctx.module_context.axis_context
    devices = machine.devices_sharing(context)
    asked, known = work.asked, work.asked.target
    if known.platform != platform:
        # Who names a backend alone names it for the platform that the trace is for.
        asked, known = dataclasses.replace(asked, only=None), machine.of_platform(platform)
    # Below shard_map each device has calls of its own; the mesh tells how many there are.
    program_devices = getattr(getattr(context, "mesh", None), "size", devices)
    # Under `only_backend` calls are taken as they are.
    number = devices if asked.only is None else 1
    target = dataclasses.replace(
        known, num_devices=number, program_devices=program_devices, counted=True
    )
    shown = None if devices == 1 else machine.show_devices(ctx, platform)
    is_split = shown is not None and number > 1
    on_each = OnOneDevice(asked, target)

    def how(call: Call, *operands: Any) -> Any:
        if isinstance(call, MatmulCall) and len(operands) > 2:
            return _of_values(how, target, call, *operands)
        if devices > 1:
            # By its key a kernel would draw the same for each device's part.
            operands = _drawn(call, lambda bits, key: _compute(bits, target, key), *operands)
        if not is_split:
            return _compute(call, target, *operands)
        if isinstance(call, QuantizeBothCall):
            # Each cast may be split along other axes, as its product is.
            return _each(how, call, *operands)
        if isinstance(call, MatmulCall) and partition.can_split(call, target):
            return partition.multiply(on_each, call, *operands)
        # Without it XLA's own partition moves values where blocks are cut.
        splits = isinstance(call, QuantizeCall) and partition.can_split(call, target)
        if splits and _of_a_part(call, target) is not None:
            return partition.quantize(on_each, call, *operands)
        return _compute(call, target, *operands)

    with on_one_device(devices == 1), asked.on(target), lowered_for(target.units):
        # Not a partial: JAX reads the signature of what it traces, slowly if it is one.
        lower = mlir.lower_fun(lambda *leaves: work.compute(how, *leaves), multiple_results=True)
        return lower(shown or ctx, *values)
