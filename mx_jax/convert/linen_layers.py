"""flax.linen: how a layer gets its recipe while it is called.

A layer that takes its product as an attribute (`kinds.py` has the table) is lent one for the length
of a call: what runs is a clone that Flax bound for it, so nobody else sees the change. Layers that
call jax.numpy by name are answered in their place: `linen_answers.py`.
"""

import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import flax.linen as nn
from flax.core import Scope, freeze
from flax.linen.dtypes import promote_dtype
from flax.linen.module import InterceptorContext

from mx_jax.convert import linen_products as products
from mx_jax.convert.kinds import ATTENTION, kind_of
from mx_jax.convert.lending import lent
from mx_jax.convert.linen_answers import ANSWERS, run_foreign
from mx_jax.convert.linen_caches import cache_loans
from mx_jax.convert.rules import Rule
from mx_jax.nn import linen as mx_linen
from mx_jax.nn.linen import Operation
from mx_jax.nn.stored import stored_param
from mx_jax.recipes import Recipe

# As an attention_fn takes them, whose attributes end in `_cls`.
_EINSUMS = tuple(slot.attribute.removesuffix("_cls") for slot in ATTENTION.linen)


@dataclasses.dataclass(frozen=True)
class Interceptor:
    """A method interceptor for `flax.linen.intercept_methods`: rules for the layers below a root.

    Attributes:
      rules: the rules.
      root: path of the converted module.
      name: its name.
    """

    rules: tuple[Rule, ...]
    root: tuple[str, ...]
    name: str | None

    def __call__(
        self, call: Callable[..., Any], args: Any, kwargs: Any, context: InterceptorContext
    ) -> Any:
        """Run a method of a module, with what the rules say of it."""
        layer, scope = context.module, context.module.scope
        path = None if scope is None else self._path(layer)
        if scope is None or path is None:
            return call(*args, **kwargs)
        _mark(scope, hash(self.rules))
        with lent(layer, _param_loan(layer)):
            return self._run(call, args, kwargs, context, path)

    def _run(
        self,
        call: Callable[..., Any],
        args: Any,
        kwargs: Any,
        context: InterceptorContext,
        path: str,
    ) -> Any:
        layer = context.module
        if context.method_name == "setup":
            return call(*args, **kwargs)
        lender = products.Lender(self.rules, layer, path)
        method = getattr(context.orig_method, "func", None)
        answer = ANSWERS.get(method)
        if answer is not None:
            return answer(lender, call, *args, **kwargs)
        loans = _loans(lender)
        if loans is None:
            return run_foreign(lender, call, args, kwargs, context.method_name)
        with lent(layer, loans | cache_loans(lender, method, loans)):
            return call(*args, **kwargs)

    def _path(self, layer: nn.Module) -> str | None:
        """Path below the root; None if it is not there."""
        names = layer.path
        if names[: len(self.root)] != self.root:
            return None
        names = names[len(self.root) :]
        if not names and layer.name != self.name:
            # A submodule that the model applies to parameters of its own making has no path.
            return layer.name or ""
        return "/".join(names)


def _mark(scope: Scope, rules: int) -> None:
    """Tell nn.jit that a scope and those below it are not like any other.

    It compiles once for equal modules, wherever they are, but rules go by path. Its key has the
    scope's flags in it, and a module below nn.jit is seen by interceptors only while it is traced:
    so a scope marks the scopes that it makes.
    """
    scope.flags = freeze({**scope.flags, "mx_jax": (rules, *scope.path)})
    # A strong reference would be a cycle, which keeps a model's variables until it is collected.
    reference = weakref.ref(scope)

    def push(*args: Any, **kwargs: Any) -> Scope:
        parent = reference()
        assert parent is not None
        child = Scope.push(parent, *args, **kwargs)
        _mark(child, rules)
        return child

    vars(scope)["push"] = push


def _param_loan(layer: nn.Module) -> dict[str, Any]:
    """A `param` that takes quantized weights, for whatever module is not ours."""
    if isinstance(layer, mx_linen.StoredParams):
        return {}
    own = functools.partial(type(layer).param, layer)
    return {"param": functools.partial(stored_param, layer, own)}


def _loans(lender: products.Lender) -> dict[str, Any] | None:
    """What to set on a layer while it runs; None if it has no attribute for a product."""
    layer: Any = lender.layer
    if isinstance(layer, Operation):
        # Part of the layer that holds it, which is noted.
        return {}
    if isinstance(getattr(layer, "recipe", None), Recipe):
        lender.note("has its own recipe")
        return {}
    kind = kind_of(layer)
    if kind is None:
        return None
    if kind is ATTENTION:
        return _attention_loans(lender)
    (slot,) = kind.linen
    obstacle = slot.obstacle(layer, products.Product)
    if obstacle is not None:
        lender.note(obstacle)
        return {}
    loans: dict[str, Any] = {slot.attribute: products.Product(lender, kind, slot.defaults[-1])}
    if getattr(layer, "promote_dtype", None) is promote_dtype:
        # Past Flax's own a stored kernel goes as it is.
        loans["promote_dtype"] = mx_linen.promote_operands
    return loans


def _attention_loans(lender: products.Lender) -> dict[str, Any]:
    layer: Any = lender.layer
    obstacle = None
    if any(slot.obstacle(layer, products.Makes) for slot in ATTENTION.linen):
        obstacle = "has its own einsum"
    elif not {*_EINSUMS} <= inspect.signature(layer.attention_fn).parameters.keys():
        obstacle = "its attention_fn takes no einsum"
    if obstacle is not None:
        for name in ATTENTION.products:
            lender.decide(name, obstacle=obstacle)
        return {}
    loans: dict[str, Any] = {
        slot.attribute: products.Makes(products.AttentionEinsum(lender, name, layer.precision))
        for slot, name in zip(ATTENTION.linen, ATTENTION.products, strict=True)
    }
    if layer.precision is not None and not isinstance(
        layer.attention_fn, products.WithoutPrecision
    ):
        loans["attention_fn"] = products.WithoutPrecision(layer.attention_fn)
    return loans
