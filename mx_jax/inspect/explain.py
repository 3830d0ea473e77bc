"""Which backend takes which product of a recipe, and why the others do not."""

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.backends.base import MatmulCall, Target
from mx_jax.backends.select import current_target, on_request, select
from mx_jax.ops.recipe_names import as_recipe
from mx_jax.specs import MatmulRecipe, MatmulSpec


def explain(
    recipe: MatmulRecipe | str,
    m: int,
    k: int,
    n: int,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    target: Target | None = None,
) -> str:
    """Say how each of the three products of `[m, k] @ [k, n]` will be computed.

    Args:
      recipe: the recipe, or its name.
      m: rows of the left operand.
      k: contracting size.
      n: columns of the right operand.
      dtype: dtype of the products.
      target: the machine; default: the one that a call here is for, as `testing.target`,
        `jax.default_device` or jax itself says.

    Returns:
      Three paragraphs of text. Each has the product and its backend, why no backend before it takes
      the product, and which ones would if they were named.

    Example:
      >>> import mx_jax
      >>> from mx_jax.backends.base import Target
      >>> recipe = mx_jax.recipes.weight_only("mxfp4")
      >>> print(mx_jax.inspect.explain(recipe, 8, 64, 64, target=Target(platform="tpu")))
      output [8, 64] x [64, 64]: high precision x mxfp4 (even, nearest) -> reference
        not xla: XLA has no native float8 dot on platform=tpu
        not cpu_ffi: runs on platform=cpu, got platform=tpu
      grad_lhs [8, 64] x [64, 64]: high precision x high precision -> jax.lax.dot_general
      grad_rhs [64, 8] x [64, 8]: high precision x high precision -> jax.lax.dot_general
    """
    recipe = as_recipe(recipe, "explain")
    target = current_target() if target is None else target
    products = (
        ("output", recipe.fwd, (m, k), (n, k)),
        ("grad_lhs", recipe.dlhs, (m, n), (k, n)),
        ("grad_rhs", recipe.drhs, (n, m), (k, m)),
    )
    lines: list[str] = []
    for name, spec, lhs_shape, rhs_shape in products:
        lines += _explain_product(name, spec, lhs_shape, rhs_shape, np.dtype(dtype), target)
    return "\n".join(lines)


def _explain_product(
    name: str,
    spec: MatmulSpec,
    lhs_shape: tuple[int, int],
    rhs_shape: tuple[int, int],
    dtype: np.dtype,
    target: Target,
) -> list[str]:
    title = f"{name} {list(lhs_shape)} x {list(rhs_shape)}: {spec}"
    if spec.is_high_precision:
        return [f"{title} -> jax.lax.dot_general"]
    call = MatmulCall(
        lhs_shape=lhs_shape,
        rhs_shape=rhs_shape,
        num_batch=0,
        num_contracting=1,
        lhs_format=spec.lhs and spec.lhs.format,
        rhs_format=spec.rhs and spec.rhs.format,
        lhs_dtype=dtype if spec.lhs is None else None,
        rhs_dtype=dtype if spec.rhs is None else None,
        out_dtype=dtype,
    )
    choice = select(call, target)
    rejected = [f"  not {backend}: {reason}" for backend, reason in choice.rejections]
    named = [
        f"  {name} takes it if named, by prefer_backends({name!r}): not proved on hardware yet"
        for name in on_request(call, target)
    ]
    return [f"{title} -> {choice.backend.name}", *rejected, *named]
