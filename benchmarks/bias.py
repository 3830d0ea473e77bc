"""Whether quantization biases gradients: the bias of their mean, beside the error of one batch.

Of n independent draws e_i of a vector with mean b, the squared length of their mean is too large:

    E |mean_i e_i|^2 = |b|^2 + tr Cov(e) / n

so without any bias it is still `noise / sqrt(n)`. Products of different draws have no such term,
since draws are independent: `E e_i . e_j = |b|^2` for i != j. So

    |b|^2 ~ sum_{i != j} e_i . e_j / (n (n - 1)) = |mean_i e_i|^2 - s^2 / n

is right on average (s^2: the variance of the draws, with n - 1), and so is the mean of products of
the draws of two vectors. All that is needed are the inner products of draws, and those of parts of
a vector add up to those of the whole. Source: U-statistics, Hoeffding 1948.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mx_jax.convert.rules import aligned
from mx_jax.ops.arguments import as_recipe
from mx_jax.recipes import MatmulSpec, Recipe, Residuals, high_precision

_HIGH = MatmulSpec(lhs=None, rhs=None)
# Leaving one out, and then another one in each product, takes three.
_FEWEST = 3
# An exact mean of less than so many times its own noise is none to take shares of.
_CLEAR = 2.0
# Of all intervals.
_CONFIDENCE = 0.95

Loss = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What n draws say of the bias of one recipe, in the whole gradient or in one parameter's.

    Attributes:
      recipe: name.
      parameter: names joined by `/`, with the layer's number behind where layers are scanned; None:
        the whole gradient.
      bias: `|E e| / |E g|`, both without what noise adds; 0 where the noise explains all there is,
        NaN where the exact mean itself cannot be distinguished from 0, or a draw is not finite.
      low: lower end of its 95 % confidence interval.
      high: upper end.
      uncorrected: `|mean e| / |mean g|`, as it is when nobody takes the noise out.
      slope: `E q . E g / |E g|^2` of `q = g + e`: below 1 the mean is too short.
      one_batch: `sqrt(mean |e|^2 / mean |g|^2)`: relative error of a single draw, a batch's
        gradient; NaN where one is not finite.
      draws: n.
      signal: the exact mean over its own noise, from draw to draw. Below 2 shares of that mean say
        little.
      loss_increase: mean loss with the recipe less the exact one; of the whole alone.
    """

    recipe: str
    parameter: str | None
    bias: float
    low: float
    high: float
    uncorrected: float
    slope: float
    one_batch: float
    draws: int
    signal: float = math.inf
    loss_increase: float | None = None

    @property
    def interval(self) -> tuple[float, float]:
        return self.low, self.high

    @property
    def near_zero(self) -> bool:
        """Whether the exact mean is so close to 0, beside its noise, that shares say little."""
        return not math.isnan(self.bias) and self.signal < _CLEAR


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientBias:
    """Biases of mean gradients at one checkpoint. Print it.

    Attributes:
      rows: for each recipe the whole gradient, then each parameter.
      exact_loss: mean loss of the batches in high precision.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> from benchmarks.bias import gradient_bias
      >>> batches = [*jax.random.normal(jax.random.key(0), (4, 32, 64))]
      >>> def loss(w, x, recipe):
      ...     return (mx_jax.matmul(x, w["up"], recipe=recipe) ** 2).mean()
      >>> w = {"up": jax.random.normal(jax.random.key(1), (64, 8))}
      >>> recipe = mx_jax.recipes.weight_only("mxfp4")
      >>> result = gradient_bias(loss, w, batches, recipe)
      >>> [row.parameter for row in result.parameters()], result.whole[0].bias < 0.2
      (['up'], True)
    """

    rows: tuple[Row, ...]
    exact_loss: float

    @property
    def whole(self) -> tuple[Row, ...]:
        """The whole gradient, one row a recipe."""
        return tuple(row for row in self.rows if row.parameter is None)

    def parameters(self, recipe: str | None = None) -> tuple[Row, ...]:
        """Single parameters of one recipe, the largest bias first; NaN last.

        Args:
          recipe: name; None: the only one.

        Raises:
          ValueError: unknown name, or several recipes and no name.
        """
        names = [row.recipe for row in self.whole]
        if recipe is None and len(names) == 1:
            recipe = names[0]
        if recipe not in names:
            raise ValueError(
                f"GradientBias.parameters: recipe must be one of {', '.join(map(repr, names))}, "
                f"got recipe={recipe!r}"
            )
        rows = [row for row in self.rows if row.parameter is not None and row.recipe == recipe]
        return tuple(sorted(rows, key=lambda row: (math.isnan(row.bias), -row.bias)))

    @property
    def caption(self) -> str:
        """How to read the numbers."""
        draws = self.rows[0].draws
        near = f"; near 0: less than {_CLEAR:g} times its own noise, so a share of it says little"
        return (
            f"n = {draws} batches at one checkpoint, loss {self.exact_loss:.4g} in high precision; "
            f"interval: {100 * _CONFIDENCE:g} %, of other batches at the same parameters"
            f"{near if any(row.near_zero for row in self.rows) else ''}"
        )

    def __str__(self) -> str:
        heads = ("recipe", "bias", "interval", "one batch", "slope", "loss")
        rows = ((row.recipe, *_cells(row)) for row in self.whole)
        return "\n".join([aligned([heads, *rows]), self.caption])


def _cells(row: Row) -> tuple[str, ...]:
    """Percentages; of an interval that begins at 0, the upper end alone."""

    def percent(value: float) -> str:
        return f"{100 * value:.3g} %"

    low, high = row.interval
    interval = f"at most {percent(high)}" if low == 0 else f"{percent(low)} to {percent(high)}"
    known = not math.isnan(row.bias)
    unknown = "Inf or NaN" if math.isnan(row.one_batch) else "hidden by noise"
    if row.near_zero:
        known, unknown = False, f"near 0: mean {row.signal:.1f} x its noise"
    return (
        percent(row.bias) if known else unknown,
        interval if known else "-",
        percent(row.one_batch),
        f"{row.slope:.3f}" if known else "-",
        "" if row.loss_increase is None else f"{row.loss_increase:+.3g}",
    )


def passes(recipe: Recipe | str) -> dict[str, Recipe]:
    """A recipe, and the same in the forward pass alone and in the backward pass alone.

    For `gradient_bias`: it shows which pass bends the gradients.

    Args:
      recipe: the recipe, or its name.

    Returns:
      By name: the recipe; with both gradient products in high precision; with the product itself
      in high precision, so that the gradients are of the exact function.

    Examples:
      >>> from benchmarks.bias import passes
      >>> list(passes("mxfp4"))
      ['mxfp4', 'mxfp4, forward alone', 'mxfp4, backward alone']
    """
    recipe = as_recipe(recipe, "passes", Recipe)
    forward, backward = (f"{recipe.name}, {name} alone" for name in ("forward", "backward"))
    change = functools.partial(dataclasses.replace, recipe)
    return {
        recipe.name: recipe,
        forward: change(name=forward, grad_input=_HIGH, grad_weight=_HIGH),
        # Without codes of the forward product there are none to keep.
        backward: change(name=backward, output=_HIGH, residuals=Residuals.PRIMAL),
    }


def gradient_bias(
    loss: Loss,
    params: object,
    batches: Iterable[Any],
    recipes: object,
    *,
    exact: object = None,
    key: jax.Array | None = None,
    scanned: str | None = None,
) -> GradientBias:
    """How far the mean gradient of recipes is from the exact one, at one checkpoint.

    The error of a single batch's gradient is mostly noise, which averages out over steps as the
    noise of the batches does. What does not average out is the bias `|E q - E g| / |E g|`, with `q`
    the gradient with the recipe and `g` the exact one. Some ten batches tell recipes apart that
    training tells apart with dozens of seeds.

    The mean over n batches still has `1 / n` of the noise's square in it; here it is taken out
    (the source has the derivation), and an interval comes from leaving out one batch
    after the other. It is about other batches at these parameters, not about other seeds or steps.

    Args:
      loss: `loss(params, batch, recipe)`, or with a `key` `loss(params, batch, recipe, key)`, to a
        scalar. It is traced once for each recipe and each shape of a batch, by `jax.jit`. With
        Flax, build the model in it: `model.clone(recipe=recipe)`, or `convert.linen(model, rules)`,
        where rules take the place of recipes.
      params: to differentiate by: any pytree of floats, linen's params or nnx's state.
      batches: three or more, independent of one another; each is read once, and all weigh the
        same, those of other shapes too.
      recipes: a recipe or the name of one, or a mapping from names to recipes, such as `passes`
        returns. A mapping's values may be whatever `loss` takes, if they can be hashed.
      exact: what `loss` takes for exact gradients; None: `recipes.high_precision()`.
      key: of stochastic recipes; each batch gets another one, the same for every recipe.
      scanned: regular expression of the parameters (names joined by `/`) whose first axis counts
        layers, as below `nn.scan`: they are reported layer by layer.

    Returns:
      Print it, or ask for its `rows`, `whole` and `parameters(recipe)`.

    Raises:
      ValueError: fewer than three batches, no recipes, a `loss` that gives no scalar, or exact
        gradients with Inf or NaN. Those of a recipe give a bias of NaN.
      TypeError: no recipe, or several without names.

    Memory: two gradients a batch on the host, and those of one batch on the device.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> from benchmarks.bias import gradient_bias
      >>> keys = jax.random.split(jax.random.key(0), 9)
      >>> w, batches = jax.random.normal(keys[8], (64, 32)), []
      >>> for key in keys[:8]:
      ...     batches.append(jax.random.normal(key, (128, 64)))
      >>> def loss(w, x, recipe):
      ...     return (mx_jax.matmul(x, w, recipe=recipe) ** 2).mean()
      >>> result = gradient_bias(loss, w, batches, {"E4M3": "mxfp8", "E2M1": "mxfp4"})
      >>> eight_bits, four_bits = result.whole
      >>> eight_bits.bias < 0.05 < four_bits.bias < four_bits.one_batch
      True
    """
    if isinstance(recipes, list | tuple):
        raise TypeError(
            "gradient_bias: several recipes need names, got recipes as a "
            f"{type(recipes).__name__}; give a mapping: {{'e4m3': 'mxfp8', 'e2m1': 'mxfp4'}}"
        )
    if not isinstance(recipes, Mapping):
        recipe = as_recipe(recipes, "gradient_bias", Recipe)
        recipes = {recipe.name: recipe}
    if not recipes:
        raise ValueError("gradient_bias: there are no recipes; got an empty mapping")
    chosen = {
        str(name): as_recipe(recipe, "gradient_bias", Recipe) if isinstance(recipe, str) else recipe
        for name, recipe in recipes.items()
    }
    batches = list(batches)
    if len(batches) < _FEWEST:
        raise ValueError(
            "gradient_bias: what noise adds to a mean is known from at least "
            f"{_FEWEST} batches, got {len(batches)}; eight or more give a useful interval"
        )

    def draw(recipe: object) -> tuple[np.ndarray, dict[str, list[np.ndarray]]]:
        """The loss of each batch, and the gradients of each parameter, one a batch."""
        losses, gradients = [], collections.defaultdict(list)
        for index, batch in enumerate(batches):
            keys = () if key is None else (jax.random.fold_in(key, index),)
            value, gradient = _loss_and_gradient(loss, recipe, params, batch, keys)
            losses.append(float(value))
            for name, leaf in _named_leaves(jax.device_get(gradient)):
                if scanned is None or not re.fullmatch(scanned, name):
                    gradients[name].append(leaf)
                    continue
                if not np.ndim(leaf):
                    raise ValueError(
                        f"gradient_bias: scanned={scanned!r} matches the parameter {name!r}, which "
                        "has no axis of layers; got a scalar"
                    )
                for layer, part in enumerate(leaf):
                    gradients[f"{name}[{layer}]"].append(part)
        return np.array(losses), gradients

    rows: list[Row] = []
    # float32 products are made of fewer bits on accelerators, and would not be exact.
    with jax.default_matmul_precision("float32"):
        exact_losses, exact_draws = draw(high_precision() if exact is None else exact)
        # A loss that has diverged in high precision has no gradient to compare with.
        bad = [
            (name, batch)
            for name, gradients in exact_draws.items()
            for batch, gradient in enumerate(gradients)
            if not np.isfinite(exact_losses[batch]) or not np.isfinite(gradient).all()
        ]
        if bad:
            name, batch = bad[0]
            raise ValueError(
                "gradient_bias: exact losses and gradients must be finite, got Inf or NaN in "
                f"batch={batch}, loss={exact_losses[batch]:g}, parameter={name!r}; take a "
                "checkpoint from before it diverged"
            )
        for name, recipe in chosen.items():
            losses, draws = draw(recipe)
            parts = {
                parameter: inner_products(gradients, draws[parameter])
                for parameter, gradients in exact_draws.items()
            }
            row = functools.partial(estimate, recipe=name)
            increase = float((losses - exact_losses).mean())
            whole = np.sum([*parts.values()], axis=0)
            rows.append(row(whole, parameter=None, loss_increase=increase))
            rows += [row(part, parameter=parameter) for parameter, part in parts.items()]
    return GradientBias(rows=tuple(rows), exact_loss=float(exact_losses.mean()))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _loss_and_gradient(
    loss: Loss, recipe: object, params: object, batch: object, keys: tuple[jax.Array, ...]
) -> tuple[jax.Array, Any]:
    return jax.value_and_grad(lambda params: loss(params, batch, recipe, *keys))(params)


def inner_products(
    exact: Sequence[Any] | np.ndarray, quantized: Sequence[Any] | np.ndarray
) -> np.ndarray:
    """Of draws of g and of `q = g + e`: `g_i . g_j`, `e_i . e_j`, `e_i . g_j`; `[3, n, n]`."""
    both = exact, quantized
    g, q = (np.stack([np.ravel(np.asarray(x, np.float64)) for x in draws]) for draws in both)
    # Inf times 0 needs no warning: `estimate` reports the NaN.
    with np.errstate(invalid="ignore"):
        e = q - g
        return np.stack([g @ g.T, e @ e.T, e @ g.T])


def estimate(products: np.ndarray, **names: Any) -> Row:
    """Bias, with an interval from leaving out one draw after the other."""
    # The squared ratio `|E e|^2 / |E g|^2` is estimated, its deviation by the jackknife with
    # Student's quantile for n - 1 degrees of freedom. Without a bias that deviation is rather too
    # large, so the interval then holds 0 more often than it says.
    from scipy.special import stdtrit  # takes longer to import than all of this module's work

    n = products.shape[-1]
    known = functools.partial(Row, draws=n, **names)
    unknown = dict.fromkeys(("bias", "low", "high", "slope"), math.nan)
    if not np.isfinite(products).all():
        # `max(0.0, nan)` is 0: without this a diverged recipe would have no bias at all.
        return known(**unknown, uncorrected=math.nan, one_batch=math.nan)
    of_exact, of_error, _ = products
    if not of_error.any():
        return known(bias=0, low=0, high=0, uncorrected=0, slope=1, one_batch=0)
    (exact, exacts), (error, errors), (mixed, _) = map(_squared_mean, products)
    # The noise that remains in the mean of n draws.
    noise = max(0.0, float(np.trace(of_exact)) / n - exact) / n
    known = functools.partial(
        known,
        uncorrected=math.sqrt(_ratio(float(of_error.sum()), float(of_exact.sum()))),
        one_batch=math.sqrt(_ratio(float(np.trace(of_error)), float(np.trace(of_exact)))),
        signal=math.sqrt(_ratio(max(0.0, exact), noise)),
    )
    if exact <= 0 or (exacts <= 0).any():
        return known(**unknown)
    ratio, ratios = error / exact, errors / exacts
    deviation = math.sqrt((n - 1) / n * float(np.sum((ratios - ratios.mean()) ** 2)))
    half = float(stdtrit(n - 1, (1 + _CONFIDENCE) / 2)) * deviation
    bias, low, high = (math.sqrt(max(0.0, x)) for x in (ratio, ratio - half, ratio + half))
    return known(bias=bias, low=low, high=high, slope=1 + mixed / exact)


def _squared_mean(products: np.ndarray) -> tuple[float, np.ndarray]:
    """Mean inner product of two different draws: of all, and with each one left out, `[n]`."""
    n, diagonal = len(products), np.diagonal(products)
    different = products.sum() - diagonal.sum()
    of_one = products.sum(0) + products.sum(1) - 2 * diagonal
    without = (different - of_one) / ((n - 1) * (n - 2))
    return float(different) / (n * (n - 1)), without


def _ratio(value: float, unit: float) -> float:
    if unit > 0:
        return value / unit
    return 0.0 if value == 0 else math.inf


def _named_leaves(tree: object) -> list[tuple[str, Any]]:
    """Leaves by their paths, joined by `/`; boxes of Flax end in `value`, which is no name."""
    named = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        boxed = path and path[-1] == jax.tree_util.GetAttrKey("value")
        keys = path[:-1] if boxed else path
        named.append((jax.tree_util.keystr(keys, simple=True, separator="/"), leaf))
    return named
