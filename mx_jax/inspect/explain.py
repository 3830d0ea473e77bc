"""Which backend takes what, and why the others do not: from records of what selection decided."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mx_jax.backends.base import Target
from mx_jax.backends.calls import (
    Call,
    DequantizeCall,
    MatmulCall,
    OperandType,
    PackCall,
    QuantizeBothCall,
    QuantizeCall,
    RaggedCall,
)
from mx_jax.backends.records import Selection, recording
from mx_jax.backends.target import use_target
from mx_jax.inspect.abstract import of_arrays
from mx_jax.ops.dot_general import matmul
from mx_jax.ops.recipe_names import as_recipe
from mx_jax.specs import MatmulRecipe


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

    `matmul` and its gradients are traced, and what selection decides meanwhile is told.
    `explain_call` tells it of any function, casts included.

    Args:
      recipe: the recipe, or its name.
      m: rows of the left operand.
      k: contracting size.
      n: columns of the right operand.
      dtype: dtype of the operands and products.
      target: the machine; default: the one that a call here is for, as `testing.target`,
        `jax.default_device` or jax itself says.

    Returns:
      Three paragraphs of text. Each has the product and its backend, what was measured if that is
      why it is asked, why no backend before it takes the product, and which ones would if they were
      named.

    Example:
      >>> import mx_jax
      >>> from mx_jax.backends.base import Target
      >>> recipe = mx_jax.recipes.weight_only("mxfp4")
      >>> target = Target(platform="rocm")
      >>> print(mx_jax.inspect.explain(recipe, 8, 64, 64, dtype="bfloat16", target=target))
      output [8, 64] x [64, 64]: high precision x mxfp4 (even, nearest) -> xla_bfloat16
          (XLA bfloat16 dot, float32 sums)
        not xla: needs two float8 operands, got lhs in high precision
        not cpu_ffi: runs on platform=cpu, got platform=rocm
      grad_lhs [8, 64] x [64, 64]: high precision x high precision -> jax.lax.dot_general
      grad_rhs [64, 8] x [64, 8]: high precision x high precision -> jax.lax.dot_general
    """
    recipe = as_recipe(recipe, "explain")
    lhs, rhs = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((m, k), (k, n)))
    machine = contextlib.nullcontext() if target is None else use_target(target)
    with machine, recording() as recorder:
        jax.eval_shape(lambda lhs, rhs: _with_gradients(recipe, lhs, rhs), lhs, rhs)
    # In the order of the products; what is in high precision is JAX's own, and no backend is asked.
    selections = iter([x for x in recorder.selections if isinstance(x.call, MatmulCall)])
    lines: list[str] = []
    for name, spec, lhs_shape, rhs_shape in (
        ("output", recipe.fwd, (m, k), (n, k)),
        ("grad_lhs", recipe.dlhs, (m, n), (k, n)),
        ("grad_rhs", recipe.drhs, (n, m), (k, m)),
    ):
        title = f"{name} {list(lhs_shape)} x {list(rhs_shape)}: {spec}"
        if spec.is_high_precision:
            lines.append(f"{title} -> jax.lax.dot_general")
        else:
            lines += _answer(title, next(selections))
    return "\n".join(lines)


def _with_gradients(recipe: MatmulRecipe, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, ...]:
    key = jax.random.key(0) if recipe.is_stochastic else None
    product, pullback = jax.vjp(lambda x, y: matmul(x, y, recipe=recipe, key=key), lhs, rhs)
    return pullback(product)


def explain_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Say how each cast and each quantized product of a call will be computed.

    The function is traced as `jit` would, without computing; take a `jax.grad` for the backward
    products. Told is what a backend is asked for; whatever stays in high precision is JAX's own.

    Args:
      function: what is called, of any kind: a model's `apply`, a train step.
      *args: its arguments; arrays may be `jax.ShapeDtypeStruct`.
      **kwargs: likewise.

    Returns:
      For each call that differs from those before, with its target where that changes: the work
      and the backend that takes it, why no backend before does, and which would if they were named.

    Raises:
      ValueError: whatever the call itself raises.

    Example:
      >>> import jax.numpy as jnp, mx_jax
      >>> with mx_jax.testing.target("tpu"):
      ...     print(mx_jax.inspect.explain_call(mx_jax.quantize, jnp.ones((8, 64)), "mxfp4"))
      on platform=tpu, num_devices=1
      cast float32 [8, 64] to mxfp4 (floor, nearest) in blocks of 32 along axis -1 -> reference
        not xla: quantizes nothing: XLA fuses the reference's own code
        not cpu_ffi: runs on platform=cpu, got platform=tpu
        not xla_bfloat16: quantizes nothing: XLA fuses the reference's own code
    """
    with recording() as recorder:
        jax.eval_shape(*of_arrays(function, *args, **kwargs))
    lines, target = [], None
    for entry in dict.fromkeys(recorder.entries):
        if isinstance(entry, str):
            lines.append(entry)
            continue
        if entry.target != target:
            target = entry.target
            lines.append(_machine(target))
        lines += _answer(_work(entry.call), entry)
    return "\n".join(lines)


def _answer(title: str, selection: Selection) -> list[str]:
    """What takes a call, and why others do not."""
    rejected = [f"  not {name}: {reason}" for name, reason in selection.rejections]
    named = [
        f"  {name} takes it if named, by prefer_backends({name!r}): {why}"
        for name, why in selection.on_request
    ]
    how = f" ({selection.how})" if selection.how else ""
    proof = [] if selection.evidence is None else [f"  {selection.backend}: {selection.evidence}"]
    return [f"{title} -> {selection.backend or 'two casts'}{how}", *proof, *rejected, *named]


def _machine(target: Target) -> str:
    capability = target.compute_capability
    shown = "" if capability is None else f", compute_capability={capability}"
    return f"on platform={target.platform}{shown}, num_devices={target.num_devices}"


def _operand(own: OperandType) -> str:
    return f"{own.dtype if own.format is None else own.format.name} {list(own.shape)}"


def _work(call: Call) -> str:
    """A call in words; shapes and axes as the arrays lie."""
    match call:
        case MatmulCall():
            lhs, rhs = (_operand(own) for _, own in call.sides)
            left, right = (list(own.axes.contracting) for _, own in call.sides)
            return f"product {lhs} x {rhs} over axes {left} and {right}, to {call.out_dtype}"
        case RaggedCall():
            lhs, rhs = _operand(call.lhs), _operand(call.rhs)
            return f"ragged product {lhs} x {rhs}, {call.num_groups} groups, to {call.out_dtype}"
        case QuantizeCall():
            how = f"{call.format.name} ({call.scale_rule.name}, {call.rounding.name})"
            blocks = " and ".join(f"{size} along axis {axis}" for axis, size in call.blocks)
            return f"cast {call.dtype} {list(call.shape)} to {how} in blocks of {blocks}"
        case QuantizeBothCall():
            return f"{_work(call.first)}; with it {_work(call.second)}"
        case DequantizeCall():
            return f"dequantize {call.format.name} {list(call.shape)} to {call.dtype}"
        case PackCall():
            axes = list(call.weights.axes.contracting)
            return f"pack {_operand(call.weights)} for axes {axes}"
