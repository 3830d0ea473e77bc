"""Which backend takes what, and why the others do not: from records of what selection decided."""

import contextlib
import numbers
from collections.abc import Callable
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax import export

from mx_jax.backends.calls import MatmulCall
from mx_jax.backends.evidence import Row, in_force
from mx_jax.backends.select import Selection, recording
from mx_jax.backends.target import Target, use_target
from mx_jax.inspect import explanation
from mx_jax.ops.arguments import as_recipe, makes_recipe
from mx_jax.ops.dot_general import matmul
from mx_jax.specs import MatmulRecipe

_SIZES = ("m", "k", "n")


@overload
def explain(
    recipe: MatmulRecipe | str,
    /,
    m: int,
    k: int,
    n: int,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    target: Target | None = None,
) -> str: ...


@overload
def explain(
    function: Callable[..., Any],
    /,
    *args: Any,
    backward: bool = False,
    target: Target | None = None,
    **kwargs: Any,
) -> explanation.Explanation: ...


def explain(what: Any, /, *args: Any, target: Target | None = None, **kwargs: Any) -> Any:
    """Say how the products of a recipe, or all casts and products of a function, are computed.

    The first form explains the three products of `[m, k] @ [k, n]` with a recipe. The second one
    traces a function, as `jit` would, without computing: who casts and multiplies what, where, how
    often and at what cost, and which products stay in high precision, and why.

    Args:
      what: a recipe or the name of one; or a function, a flax.nnx model, or a flax.linen module,
        which is initialized abstractly.
      *args: of a recipe `m`, `k` and `n`: rows of the left operand, contracting size, columns of
        the right one. Of a function its arguments; arrays may be `jax.ShapeDtypeStruct`.
      target: the machine; default: the one that a call here is for, as `testing.target`,
        `jax.default_device` or jax itself says.
      **kwargs: of a recipe `dtype` of operands and products, float32 by default. Of a function its
        keyword arguments, and `backward`: whether to take the gradients by all its floats, and by
        a model's parameters, too.

    Returns:
      Of a recipe three paragraphs of text. Each has the product and its backend, what was measured
      if that is why it is asked, why no backend before it takes the product, and which ones would
      if they were named. Of a function an `Explanation`: print it, hand it to rich, or ask for its
      `rows`.

    Raises:
      ValueError: a size below 0, or whatever the call itself raises.
      TypeError: neither a recipe nor a function, or a recipe without its three sizes, whole ones.

    Examples:
      >>> import jax, mx_jax
      >>> from mx_jax.backends.target import Target
      >>> recipe = mx_jax.recipes.weight_only("mxfp4")
      >>> target = Target(platform="rocm")
      >>> print(mx_jax.inspect.explain(recipe, 8, 64, 64, dtype="bfloat16", target=target))
      output [8, 64] x [64, 64]: high precision x mxfp4 (even, nearest) -> xla_bfloat16
          (XLA bfloat16 dot, float32 sums)
        not xla: needs two float8 operands, got lhs in high precision
        not cpu_ffi: runs on platform=cpu, got platform=rocm
        not xla_scaled: XLA has this product on platform=cuda, got platform=rocm
      grad_input [8, 64] x [64, 64]: high precision x high precision -> jax.lax.dot_general
      grad_weight [64, 8] x [64, 8]: high precision x high precision -> jax.lax.dot_general

      >>> x, w = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 64), (64, 64)))
      >>> def layer(x, w):
      ...     return mx_jax.matmul(x, w, recipe="mxfp8") @ w
      >>> found = mx_jax.inspect.explain(layer, x, w, target=target)
      >>> [(row.kind, row.times, row.backend) for row in found.rows]
      [('cast', 1, 'reference'), ('cast', 1, 'reference'), ('product', 1, 'xla_bfloat16'),
       ('high precision', 1, 'jax.lax')]
      >>> found.quantized_share
      0.5
    """
    machine = contextlib.nullcontext() if target is None else use_target(target)
    with machine:
        of_recipe = isinstance(what, str | MatmulRecipe) or makes_recipe(what)
        if of_recipe or not explanation.callable_model(what):
            recipe = as_recipe(what, "explain")
            return _of_recipe(recipe, **_with_sizes(recipe, args, kwargs))
        return explanation.explanation_of(what, *args, **kwargs)


def _with_sizes(
    recipe: MatmulRecipe, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """What `_of_recipe` takes beside a recipe, by name; checked."""
    found = dict(zip(_SIZES, args, strict=False)) | kwargs
    once = len(found) == len(args) + len(kwargs)
    sizes: list[Any] = [found.get(name) for name in _SIZES]
    whole = all(_is_number(x) or export.is_symbolic_dim(x) for x in sizes)
    if once and whole and found.keys() <= {*_SIZES, "dtype"}:
        plain = {x: int(found[x]) for x in _SIZES if _is_number(found[x])}
        if any(size < 0 for size in plain.values()):
            raise ValueError(
                "explain: the sizes of a product [m, k] @ [k, n] must be 0 or more, got "
                f"{', '.join(f'{name}={found[name]}' for name in _SIZES)}; an open one "
                "is a dimension of jax.export.symbolic_shape"
            )
        return found | plain
    got = [_in_words(x) for x in args] + [f"{name}={_in_words(kwargs[name])}" for name in kwargs]
    raise TypeError(
        f"explain: a recipe needs the whole sizes of a product [m, k] @ [k, n], and takes a dtype, "
        f"got recipe={recipe.name!r} with ({', '.join(got)}); give them, as in "
        f"explain({recipe.name!r}, 16, 4096, 4096), or explain a function that multiplies with the "
        "recipe, and its arguments"
    )


def _is_number(x: Any) -> bool:
    """A whole number; Python counts True and False among them."""
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def _in_words(x: Any) -> str:
    """An array by its shape."""
    return f"{type(x).__name__} {list(x.shape)}" if hasattr(x, "shape") else repr(x)


def _of_recipe(
    recipe: MatmulRecipe, m: int, k: int, n: int, *, dtype: jax.typing.DTypeLike = jnp.float32
) -> str:
    """What `explain` says of a recipe."""
    key = jax.random.key(0) if recipe.is_stochastic else None

    def gradients(lhs: jax.Array, rhs: jax.Array) -> Any:
        product, pullback = jax.vjp(lambda x, y: matmul(x, y, recipe=recipe, key=key), lhs, rhs)
        return pullback(product)

    with recording() as recorder:
        jax.eval_shape(gradients, *(jax.ShapeDtypeStruct(x, dtype) for x in ((m, k), (k, n))))
    # In the order of the products; what is in high precision is JAX's own, and no backend is asked.
    selections = iter([x for x in recorder.selections if isinstance(x.call, MatmulCall)])
    lines: list[str] = []
    for name, spec, lhs_shape, rhs_shape in (
        ("output", recipe.fwd, (m, k), (n, k)),
        ("grad_input", recipe.dlhs, (m, n), (k, n)),
        ("grad_weight", recipe.drhs, (n, m), (k, m)),
    ):
        title = f"{name} {list(lhs_shape)} x {list(rhs_shape)}: {spec}"
        if spec.is_high_precision:
            lines.append(f"{title} -> jax.lax.dot_general")
        else:
            lines += _answer(title, next(selections))
    return "\n".join(lines)


def explain_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Say how each cast and each quantized product of a call will be computed.

    The function is traced as `jit` would, without computing; take a `jax.grad` for the backward
    products. What stays in high precision is JAX's own, and is not listed.

    Args:
      function: what is called, of any kind: a model's `apply`, a train step.
      *args: its arguments; arrays may be `jax.ShapeDtypeStruct`.
      **kwargs: likewise.

    Returns:
      For each call that differs from those before, with its target where that changes: the work
      and the backend that takes it, why no backend before does, and which would if they were named.

    Raises:
      ValueError: whatever the call itself raises.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> with mx_jax.testing.target("tpu"):
      ...     print(mx_jax.inspect.explain_call(mx_jax.quantize, jnp.ones((8, 64)), "mxfp4"))
      on platform=tpu, num_devices=1
      cast float32 [8, 64] to mxfp4 (floor, nearest) in blocks of 32 along axis -1 -> reference
        not xla: quantizes nothing: XLA fuses the reference's own code
        not cpu_ffi: runs on platform=cpu, got platform=tpu
        not xla_scaled: quantizes nothing: XLA fuses the reference's own code
        not xla_bfloat16: quantizes nothing: XLA fuses the reference's own code
    """
    with recording() as recorder:
        jax.eval_shape(*explanation.of_arrays(function, *args, **kwargs))
    lines, target = [], None
    for entry in dict.fromkeys(recorder.entries):
        if isinstance(entry, str):
            lines.append(entry)
            continue
        if entry.target != target:
            target = entry.target
            lines.append(explanation.machine_text(target))
        lines += _answer(explanation.work_text(entry.call), entry)
    return "\n".join(lines)


def _answer(title: str, selection: Selection) -> list[str]:
    """What takes a call, and why others do not."""
    how = f" ({selection.how})" if selection.how else ""
    answer = f"{title} -> {selection.backend or 'two casts'}{how}"
    return [answer, *(f"  {reason}" for reason in explanation.reasons(selection))]


def evidence_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Row, ...]:
    """The measured rows by which kernels take parts of a call: what to record beside its results.

    The function is traced as `jit` would, without computing; where no row counts, not even that.
    Another program, or the same one where other rows count, may round otherwise. A file of the
    rows, which `mx_jax.backends.evidence.write` makes, gives the same choices back:
    `MX_JAX_EVIDENCE` names it.

    Args:
      function: what is called, of any kind: a model's `apply`, a train step.
      *args: its arguments; arrays may be `jax.ShapeDtypeStruct`.
      **kwargs: likewise.

    Returns:
      Each row once, in the order of use; none where no kernel was asked for a measurement's sake.

    Raises:
      ValueError: whatever the call itself raises.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> mx_jax.inspect.evidence_of(mx_jax.quantize, jnp.ones((8, 64)), "mxfp4")
      ()
    """
    if not in_force():
        return ()
    with recording() as recorder:
        jax.eval_shape(*explanation.of_arrays(function, *args, **kwargs))
    rows = (selection.evidence for selection in recorder.selections)
    return tuple(dict.fromkeys(row for row in rows if row is not None))
