"""A function traced as `jit` would, and what selection decided meanwhile matched to its jaxpr."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mx_jax.backends.select import Recorder, Selection, recording
from mx_jax.backends.target import current_target
from mx_jax.inspect.abstract import of_arrays
from mx_jax.inspect.calls_in_words import machine_text, work_text
from mx_jax.inspect.explanation import Explanation, Row, cost_of, kind_of
from mx_jax.inspect.jaxpr_products import Computed, computed

# Streams that layers draw from; a module takes those that it has.
_STREAMS = ("params", "dropout", "quantize")


def callable_model(what: Any) -> bool:
    """Whether it is something that can be traced: a function, or a model."""
    return callable(what) or _is_linen(what)


def explanation_of(function: Any, *args: Any, backward: bool = False, **kwargs: Any) -> Explanation:
    """Trace a call and tell each cast and product: see `explain`."""
    function, args = _with_parameters(function, args, kwargs)
    call, arrays = of_arrays(function, *args, **kwargs)
    with recording(marks=True) as recorder:
        jaxpr = jax.make_jaxpr(_gradients(call) if backward else call)(arrays)
    found = list(computed(jaxpr))
    selections = [own for own in recorder.entries if isinstance(own, Selection)]
    machine = machine_text(selections[0].target if selections else current_target())
    remarks = dict.fromkeys(own for own in recorder.entries if isinstance(own, str))
    return Explanation(
        rows=(*_selected(recorder, found), *_high(found)), remarks=tuple(remarks), machine=machine
    )


def _is_linen(what: Any) -> bool:
    """By what it offers: only the layers of models import Flax."""
    return callable(getattr(what, "init", None)) and callable(getattr(what, "apply", None))


def _with_parameters(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A model as a function of its parameters: so they are no constants, and have gradients."""
    if _is_linen(function):
        rngs = {name: jax.random.key(0) for name in _STREAMS}
        init, arrays = of_arrays(
            lambda *own, **named: function.init(rngs, *own, **named), *args, **kwargs
        )
        variables = jax.eval_shape(init, arrays)

        def apply(variables: Any, *own: Any, **named: Any) -> Any:
            return function.apply(variables, *own, rngs=rngs, mutable=True, **named)[0]

        return apply, (variables, *args)
    if jax.tree.leaves(function) != [function]:
        # A model that is a pytree, as those of flax.nnx are.
        return lambda model, *own, **named: model(*own, **named), (function, *args)
    return function, args


def _gradients(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Gradients by every float of what is summed up of the results."""

    def run(arrays: list[Any]) -> Any:
        floats = [jnp.issubdtype(own.dtype, jnp.floating) for own in arrays]

        def total(varied: list[Any]) -> Any:
            given = iter(varied)
            merged = [next(given) if own else x for own, x in zip(floats, arrays, strict=True)]
            leaves = jax.tree.leaves(call(merged))
            sums = [x.sum() for x in leaves if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
            return sum(own.astype(jnp.float32) for own in sums)

        return jax.value_and_grad(total)([x for x, own in zip(arrays, floats, strict=True) if own])

    return run


def _selected(recorder: Recorder, found: list[Computed]) -> list[Row]:
    """A row for each different selection that something of the jaxpr computes."""
    rows: dict[Selection, Row] = {}
    by_entry: dict[int | None, list[Computed]] = {}
    for own in found:
        by_entry.setdefault(own.entry, []).append(own)
    for index, selection in enumerate(recorder.entries):
        if not isinstance(selection, Selection) or index not in by_entry:
            continue
        flops, size = cost_of(selection.call)
        new = Row(
            kind=kind_of(selection.call),
            work=work_text(selection.call),
            backend=selection.backend or "",
            times=sum(own.times for own in by_entry[index]),
            places=tuple(own.place for own in by_entry[index]),
            flops=flops,
            bytes=size,
            how=selection.how,
            selection=selection,
        )
        rows[selection] = _joined(rows.get(selection), new)
    return list(rows.values())


def _high(found: list[Computed]) -> list[Row]:
    """Products that nobody selected, equal ones together."""
    rows: dict[tuple[str, str], Row] = {}
    for own in found:
        if own.entry is None:
            new = Row(
                kind="high precision",
                work=own.product,
                backend="jax.lax",
                times=own.times,
                places=(own.place,),
                flops=own.flops,
                bytes=own.bytes,
                why=own.why,
            )
            key = own.product, own.why
            rows[key] = _joined(rows.get(key), new)
    return list(rows.values())


def _joined(known: Row | None, new: Row) -> Row:
    """Two rows of the same work as one."""
    if known is None:
        return dataclasses.replace(new, places=tuple(dict.fromkeys(new.places)))
    places = dict.fromkeys((*known.places, *new.places))
    return dataclasses.replace(known, times=known.times + new.times, places=tuple(places))
