"""Which layers bear which format: one layer at a time, and the best choice under a budget."""

import functools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.formats import block_format
from mx_jax.inspect.budget import Budget, best_choice
from mx_jax.inspect.gradients import path_name
from mx_jax.inspect.sensitivity_table import Candidate, Sensitivity
from mx_jax.ops.quantize import cast
from mx_jax.recipes import weight_only

# Rounds of a tighter limit, until the loss that is really there fits.
_ROUNDS = 8


def sensitivity(
    loss: Callable[[Any, Any], jax.Array],
    params: Any,
    batches: Iterable[Any],
    formats: str | Sequence[Any] = ("mxfp4", "mxfp6_e2m3", "mxfp8_e4m3"),
    *,
    budget: Budget,
    layers: str = r"(.*/)?kernel",
    axis: int = -2,
    scanned: str | None = None,
) -> Sensitivity:
    """How much the loss rises when one layer's weights are in a format, and what to choose.

    Each layer in each format alone is one evaluation of the loss: its weights are replaced by what
    the format holds of them, blocks along the contracting axis, as `convert.weights` stores them.
    Then each layer gets one of the formats, or stays as it is, such that the budget is kept and the
    sum of the increases is least, where one below zero counts as none: it is there by chance (for a
    budget of loss: the bytes are least). Increases of several layers
    do not simply add up. So the loss of the whole choice is computed too, and where it exceeds a
    budget of loss, the choice is made again with a tighter one until it does not.

    Args:
      loss: `loss(params, batch)`, a scalar; it is jitted.
      params: any pytree: linen's params or variables, or nnx's state.
      batches: one or more of equal shape; several tell how sure an increase is.
      formats: block formats, or names of them; each with the scale rule that loses least for it.
        One with which the loss of a layer is Inf or NaN is not chosen for it.
      budget: of bytes, bits a parameter, or loss.
      layers: regular expression of the parameters to choose for: names joined by `/`.
      axis: that their products contract: -2 of kernels `[in, out]`.
      scanned: regular expression of those whose first axis counts layers, as below `nn.scan`: they
        are chosen for together, as conversion sees them.

    Returns:
      Print it, ask for its `rows` and `chosen`, or let conversion read it: `rules(convert.Rule)`
      gives rules, `write("rules.toml")` a file for `python -m mx_jax quantize --rules`.

    Raises:
      ValueError: no layers, no batches, a loss that is not finite, a budget that nothing fits, or a
        parameter whose product is not known from its shape.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> from mx_jax.inspect import Budget, sensitivity
      >>> w = jax.random.normal(jax.random.key(0), (64, 64))
      >>> params = {"easy": {"kernel": jnp.sign(w)}, "hard": {"kernel": w}}
      >>> def loss(params, x):
      ...     return sum(((x @ p["kernel"]) ** 2).mean() for p in params.values())
      >>> batch = jax.random.normal(jax.random.key(1), (8, 64))
      >>> found = sensitivity(loss, params, [batch], ["mxfp4", "mxint8"], budget=Budget(bits=6.5))
      >>> found.chosen
      {'easy/kernel': 'mxfp4', 'hard/kernel': 'mxint8'}
    """
    batches = list(batches)
    if not batches:
        raise ValueError("sensitivity: needs at least one batch, got none")
    weights = _weights(params, layers, axis, scanned)
    run = functools.partial(_losses, jax.jit(loss), params, batches)
    before = run({})
    if not np.isfinite(before).all():
        raise ValueError(
            "sensitivity: the loss must be finite while nothing is quantized, got "
            f"loss={', '.join(f'{loss:g}' for loss in before)}; take parameters from before it "
            "diverged"
        )
    formats = (formats,) if isinstance(formats, str) else formats
    rows = [
        _candidate(name, leaf, format, run, before, axis)
        for name, leaf in weights.items()
        for format in (*map(block_format, formats), None)
    ]
    by_layer = {name: [row for row in rows if row.layer == name] for name in weights}
    chosen, after = _choose(by_layer, budget, lambda own: run(_cast(weights, own, axis)) - before)
    return Sensitivity(
        rows=tuple(rows),
        choices=tuple(chosen),
        budget=budget,
        loss=float(before.mean()),
        increase=float(after.mean()),
    )


def _weights(params: Any, layers: str, axis: int, scanned: str | None) -> dict[str, jax.Array]:
    """The parameters to choose for, by name."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = path_name(path)
        if re.fullmatch(layers, name) and jnp.issubdtype(leaf.dtype, jnp.floating):
            expected = 3 if scanned is not None and re.fullmatch(scanned, name) else 2
            if leaf.ndim != expected:
                raise ValueError(
                    f"sensitivity: the parameter {name!r} must have {expected} axes, got "
                    f"shape={tuple(leaf.shape)}; which axis a product contracts is known of "
                    "[in, out] alone, and of [layers, in, out] by scanned=; leave others out "
                    "by layers="
                )
            found[name] = leaf
    if not found:
        names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        raise ValueError(
            f"sensitivity: layers={layers!r} matches none of the parameters "
            f"{', '.join(map(repr, names[:8]))}{', ...' if len(names) > 8 else ''}"
        )
    return found


def _losses(
    loss: Callable[[Any, Any], jax.Array],
    params: Any,
    batches: Sequence[Any],
    changed: dict[str, jax.Array],
) -> np.ndarray:
    """The loss of each batch, with some parameters changed."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    params = jax.tree.unflatten(tree, [changed.get(path_name(path), x) for path, x in leaves])
    return np.array([float(loss(params, batch)) for batch in batches])


def _as_held(leaf: jax.Array, format: Any, axis: int) -> jax.Array:
    """Weights as a format holds them, by the scale rule that conversion takes."""
    spec = weight_only(format).fwd.rhs
    assert spec is not None
    return cast(leaf, spec.format, axis=axis, scale_rule=spec.scale_rule)


def _cast(
    weights: dict[str, jax.Array], chosen: Sequence[Candidate], axis: int
) -> dict[str, jax.Array]:
    return {
        own.layer: _as_held(weights[own.layer], own.format, axis)
        for own in chosen
        if own.format is not None
    }


def _candidate(
    name: str,
    leaf: jax.Array,
    format: Any,
    run: Callable[[dict[str, jax.Array]], np.ndarray],
    before: np.ndarray,
    axis: int,
) -> Candidate:
    """One layer in one format, everything else as it is."""
    if format is None:
        return Candidate(
            layer=name,
            shape=tuple(leaf.shape),
            format=None,
            bytes=leaf.size * leaf.dtype.itemsize,
            increase=0.0,
            deviation=0.0,
        )
    increase = run({name: _as_held(leaf, format, axis)}) - before
    n = len(increase)
    return Candidate(
        layer=name,
        shape=tuple(leaf.shape),
        format=format,
        bytes=math.ceil(leaf.size * format.bits_per_element / 8),
        increase=float(increase.mean()),
        deviation=float(increase.std(ddof=1)) / math.sqrt(n) if n > 1 else None,
    )


def _choose(
    by_layer: dict[str, list[Candidate]],
    budget: Budget,
    measure: Callable[[Sequence[Candidate]], np.ndarray],
) -> tuple[list[Candidate], np.ndarray]:
    """The best choice, and how far the loss rises with it, batch by batch."""
    # A loss of NaN would count as none that rises. A layer may always stay as it is.
    options = [[row for row in own if math.isfinite(row.increase)] for own in by_layer.values()]
    # A cast that lowers the loss does so by chance: it is as good as none.
    increases = [[max(0.0, row.increase) for row in own] for own in options]
    sizes = [[float(row.bytes) for row in own] for own in options]
    if budget.loss is None:
        parameters = sum(math.prod(own[0].shape) for own in options)
        limit = float(budget.bytes or 0) if budget.bits is None else budget.bits * parameters / 8
        found = best_choice(increases, sizes, limit)
        if found is None:
            least = sum(map(min, sizes))
            raise ValueError(
                f"sensitivity: a budget of {budget} is {limit:,.0f} bytes, but the smallest "
                f"formats take {least:,.0f} bytes ({8 * least / parameters:.3g} bits a parameter)"
            )
        chosen = [own[index] for own, index in zip(options, found, strict=True)]
        return chosen, measure(chosen)
    limit = budget.loss
    for _ in range(_ROUNDS):
        found = best_choice(sizes, increases, limit)
        assert found is not None  # every layer may stay as it is
        chosen = [own[index] for own, index in zip(options, found, strict=True)]
        after = measure(chosen)
        if after.mean() <= budget.loss:
            return chosen, after
        rises = float(after.mean())
        limit *= 0.9 * budget.loss / rises if math.isfinite(rises) else 0.5
    chosen = [own[-1] for own in options]
    return chosen, measure(chosen)
