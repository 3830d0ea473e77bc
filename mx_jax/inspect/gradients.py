"""Whether quantization bends gradients: the bias of their mean, beside the error of one batch."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mx_jax.inspect.bias_estimate import InnerProducts, estimate
from mx_jax.inspect.bias_table import GradientBias, Row
from mx_jax.ops.arguments import as_recipe
from mx_jax.recipes import MatmulSpec, Recipe, Residuals, high_precision

_HIGH = MatmulSpec(lhs=None, rhs=None)
# Leaving one out, and then another one in each product, takes three.
_FEWEST = 3

Loss = Callable[..., jax.Array]


def passes(recipe: Recipe | str) -> dict[str, Recipe]:
    """A recipe, and the same in the forward pass alone and in the backward pass alone.

    For `gradient_bias`: it tells which pass bends the gradients.

    Args:
      recipe: the recipe, or its name.

    Returns:
      By name: the recipe; with both gradient products in high precision; with the product itself
      in high precision, so that the gradients are of the exact function.

    Examples:
      >>> import mx_jax
      >>> list(mx_jax.inspect.passes("mxfp4"))
      ['mxfp4', 'mxfp4, forward alone', 'mxfp4, backward alone']
    """
    recipe = as_recipe(recipe, "passes", Recipe)
    forward, backward = (f"{recipe.name}, {name} alone" for name in ("forward", "backward"))
    change = functools.partial(dataclasses.replace, recipe)
    return {
        recipe.name: recipe,
        forward: change(name=forward, dlhs=_HIGH, drhs=_HIGH),
        # Without codes of the forward product there are none to keep, and nothing is clipped.
        backward: change(name=backward, fwd=_HIGH, residuals=Residuals.PRIMAL, mask_clipped=False),
    }


def gradient_bias(
    loss: Loss,
    params: Any,
    batches: Iterable[Any],
    recipes: Any,
    *,
    exact: Any = None,
    key: jax.Array | None = None,
    scanned: str | None = None,
    confidence: float = 0.95,
) -> GradientBias:
    """How far the mean gradient of recipes is from the exact one, at one checkpoint.

    The error of a single batch's gradient is mostly noise, which averages out over steps as the
    noise of the batches does. What does not average out is the bias `|E q - E g| / |E g|`, with `q`
    the gradient with the recipe and `g` the exact one. Some ten batches tell recipes apart that
    training tells apart with dozens of seeds.

    The mean over n batches still has `1 / n` of the noise's square in it; here it is taken out
    (`inspect.bias_estimate` has the derivation), and an interval comes from leaving out one batch
    after the other. It is about other batches at these parameters, not about other seeds or steps.

    Args:
      loss: `loss(params, batch, recipe)`, or with a `key` `loss(params, batch, recipe, key)`, to a
        scalar. It is traced once for each recipe and each shape of a batch, by `jax.jit`. With
        Flax, build the model in it: `model.clone(recipe=recipe)`, or `convert.linen(model, rules)`,
        where rules take the place of recipes.
      params: what gradients are taken by: any pytree of floats, linen's params or nnx's state.
      batches: three or more, independent of one another; each is read once, and all weigh the
        same, those of other shapes too.
      recipes: a recipe or the name of one, or a mapping from names to recipes, such as `passes`
        returns. A mapping's values may be whatever `loss` takes, if they can be hashed.
      exact: what `loss` takes for exact gradients; None: `recipes.high_precision()`.
      key: of stochastic recipes; each batch gets another one, the same for every recipe.
      scanned: regular expression of the parameters (names joined by `/`) whose first axis counts
        layers, as below `nn.scan`: they are reported layer by layer.
      confidence: of the intervals, 0 to 1.

    Returns:
      Print it, hand it to rich, or ask for its `rows`, `whole` and `parameters(recipe)`.

    Raises:
      ValueError: fewer than three batches, no recipes, a `loss` that gives no scalar, or exact
        gradients with Inf or NaN. Those of a recipe are told as a bias of NaN.
      TypeError: no recipe, or several without names.

    Memory: two gradients a batch on the host, and those of one batch on the device.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> keys = jax.random.split(jax.random.key(0), 9)
      >>> w, batches = jax.random.normal(keys[8], (64, 32)), []
      >>> for key in keys[:8]:
      ...     batches.append(jax.random.normal(key, (128, 64)))
      >>> def loss(w, x, recipe):
      ...     return (mx_jax.matmul(x, w, recipe=recipe) ** 2).mean()
      >>> found = mx_jax.inspect.gradient_bias(loss, w, batches, {"E4M3": "mxfp8", "E2M1": "mxfp4"})
      >>> eight_bits, four_bits = found.whole
      >>> eight_bits.bias < 0.05 < four_bits.bias < four_bits.one_batch
      True
    """
    if not 0 < confidence < 1:
        raise ValueError(f"gradient_bias: confidence must be between 0 and 1, got {confidence}")
    chosen = _choices(recipes)
    batches = list(batches)
    if len(batches) < _FEWEST:
        raise ValueError(
            "gradient_bias: what noise adds to a mean is known from at least "
            f"{_FEWEST} batches, got {len(batches)}; eight or more give a useful interval"
        )
    draw = functools.partial(_draws, loss, params, batches, key, scanned)
    # float32 products are made of fewer bits on accelerators, and would not be exact.
    with jax.default_matmul_precision("float32"):
        exact_losses, exact_draws = draw(high_precision() if exact is None else exact)
        _check_finite(exact_losses, exact_draws)
        rows: list[Row] = []
        for name, recipe in chosen.items():
            losses, draws = draw(recipe)
            increase = losses - exact_losses
            rows += _rows(name, exact_draws, draws, increase, confidence)
    return GradientBias(
        rows=tuple(rows), exact_loss=float(exact_losses.mean()), confidence=confidence
    )


def _check_finite(losses: np.ndarray, draws: dict[str, list[np.ndarray]]) -> None:
    """What has diverged in high precision already has no gradient to compare with."""
    for name, own in draws.items():
        for batch, (loss, gradient) in enumerate(zip(losses, own, strict=True)):
            if not np.isfinite(loss) or not np.isfinite(gradient).all():
                raise ValueError(
                    "gradient_bias: exact losses and gradients must be finite, got Inf or NaN in "
                    f"batch={batch}, loss={loss:g}, parameter={name!r}; take a checkpoint from "
                    "before it diverged"
                )


def _choices(recipes: Any) -> dict[str, Any]:
    """Recipes by name."""
    if isinstance(recipes, list | tuple):
        raise TypeError(
            "gradient_bias: several recipes need names, got recipes as a "
            f"{type(recipes).__name__}; give a mapping: {{'e4m3': 'mxfp8', 'e2m1': 'mxfp4'}}"
        )
    if not isinstance(recipes, Mapping):
        recipe = as_recipe(recipes, "gradient_bias", Recipe)
        return {recipe.name: recipe}
    if not recipes:
        raise ValueError("gradient_bias: there are no recipes; got an empty mapping")
    return {
        str(name): as_recipe(own, "gradient_bias", Recipe) if isinstance(own, str) else own
        for name, own in recipes.items()
    }


@functools.partial(jax.jit, static_argnums=(0, 1))
def _loss_and_gradient(
    loss: Loss, recipe: Any, params: Any, batch: Any, keys: tuple[jax.Array, ...]
) -> tuple[jax.Array, Any]:
    return jax.value_and_grad(lambda params: loss(params, batch, recipe, *keys))(params)


def _draws(
    loss: Loss,
    params: Any,
    batches: Sequence[Any],
    key: jax.Array | None,
    scanned: str | None,
    recipe: Any,
) -> tuple[np.ndarray, dict[str, list[np.ndarray]]]:
    """The loss of each batch, and the gradients of each parameter, one a batch."""
    losses, found = [], {}
    for index, batch in enumerate(batches):
        keys = () if key is None else (jax.random.fold_in(key, index),)
        value, gradient = _loss_and_gradient(loss, recipe, params, batch, keys)
        losses.append(float(value))
        for name, part in _parts(jax.device_get(gradient), scanned):
            found.setdefault(name, []).append(part)
    return np.array(losses), found


def _parts(gradient: Any, scanned: str | None) -> Iterable[tuple[str, np.ndarray]]:
    """Parameters by their paths; those of scanned layers one by one."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        name, leaf = path_name(path), np.asarray(leaf)
        if scanned is None or not re.fullmatch(scanned, name):
            yield name, leaf
            continue
        if not leaf.ndim:
            raise ValueError(
                f"gradient_bias: scanned={scanned!r} matches the parameter {name!r}, which has no "
                "axis of layers; got a scalar"
            )
        yield from ((f"{name}[{layer}]", part) for layer, part in enumerate(leaf))


def path_name(path: tuple[Any, ...]) -> str:
    """A path in a pytree as names joined by `/`, as conversion has them.

    Boxes of Flax, nnx's variables among them, end in an attribute `value`, which is not in names.
    """
    names = [jax.tree_util.keystr((entry,), simple=True) for entry in path]
    boxed = path and path[-1] == jax.tree_util.GetAttrKey("value")
    return "/".join(names[:-1] if boxed else names)


def _rows(
    name: str,
    exact: dict[str, list[np.ndarray]],
    draws: dict[str, list[np.ndarray]],
    increase: np.ndarray,
    confidence: float,
) -> list[Row]:
    """The whole gradient first, then each parameter."""
    parts = {
        parameter: InnerProducts.of(
            own,
            [
                np.subtract(q, g, dtype=np.float64)
                for q, g in zip(draws[parameter], own, strict=True)
            ],
        )
        for parameter, own in exact.items()
    }
    whole = functools.reduce(InnerProducts.__add__, parts.values())
    mean = float(increase.mean())
    return [
        Row(recipe=name, parameter=None, loss_increase=mean, estimate=estimate(whole, confidence)),
        *(
            Row(
                recipe=name,
                parameter=parameter,
                loss_increase=None,
                estimate=estimate(own, confidence),
            )
            for parameter, own in parts.items()
        ),
    ]
