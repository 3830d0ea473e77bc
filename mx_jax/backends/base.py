"""What a backend has to answer: which calls it takes on which machine, and what runs them."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from mx_jax.axes import Side
from mx_jax.backends.calls import (
    AttendCall,
    Call,
    CastStatisticsCall,
    DequantizeCall,
    MatmulCall,
    PackCall,
    QuantizeBothCall,
    QuantizeCall,
    RaggedCall,
)
from mx_jax.backends.target import Target as Target

# What a kernel can be told of how it computes, such as its tiles: names and numbers.
Config = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offer:
    """One kind of call that a backend takes.

    Attributes:
      call: its type.
      rejects: given a call and the target, why this call cannot be taken there, e.g.
        `"needs k % 128 == 0, got k=96"`; None to accept. Decided from the description alone,
        before anything runs.
      run: given the operands and the call last, what the call asks for. MatmulCall: `(lhs, rhs,
        call)` to the product `[*batch, *m, *n]` in `call.out_dtype`; rhs may be weights that this
        backend packed for a product of these axes. RaggedCall: `(lhs, rhs, group_sizes, call)`, the
        sizes int32 `[g]` of at most all rows. QuantizeCall: `(x, random_bits, tensor_scale,
        call)` to an MXArray without a gradient link. QuantizeBothCall: likewise, with a pair of
        random bits, to a pair. DequantizeCall: `(x, call)` to values in `call.dtype`. PackCall:
        `(x, call)` to x in this backend's own layout, or to x itself. AttendCall: `(queries, keys,
        values, position, call)` to float32 like queries. CastStatisticsCall: `(x, array, call)` to
        what `reference.statistics.of_cast` gives: counts alike, sums within float32's rounding;
        subnormal values count in sums or not, as they do for the machine's arithmetic.
      how: what computes it, in words, where the backend's name does not say it.
      lays_out: the side whose weights, which did not come packed, it brings into a layout of its
        own, at every call and in more than one kernel: then who stored them is told of
        `pack_weights`. None: neither.
      is_plain: whether it runs plain JAX alone, on any part of the operands as on all of them.
      platform: on which `run` can be lowered; elsewhere the reference is. None: every one.
      inline: whether `run` is traced in place and not when it is lowered: interpreters of kernels
        have effects, which JAX wants to see.
    """

    call: type[Call]
    rejects: Callable[[Any, Target], str | None]
    run: Callable[..., Any]
    how: str = ""
    lays_out: Callable[[Any], Side | None] = lambda call: None
    is_plain: bool = False
    platform: str | None = None
    inline: bool = False


# Why a backend does not take a kind of call that it does not offer.
NOT_OFFERED: Mapping[type[Call], str] = {
    MatmulCall: "multiplies nothing: XLA's own dot does",
    RaggedCall: "multiplies no groups of rows",
    QuantizeCall: "quantizes nothing: XLA fuses the reference's own code",
    QuantizeBothCall: "casts once at a time",
    DequantizeCall: "dequantizes nothing: XLA fuses the reference's own code",
    PackCall: "has no layout of its own for weights",
    CastStatisticsCall: "counts nothing: XLA fuses the reference's own code",
    AttendCall: "attends to nothing: XLA's own dot and softmax do",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configured:
    """What an offer runs, as a kernel of its backend is told to.

    Attributes:
      run: the offer's own.
      context: the backend's `configured`.
      kernel: name of one.
      config: what it is told.
    """

    run: Callable[..., Any]
    context: Callable[[str, Config], AbstractContextManager[None]]
    kernel: str
    config: Config

    def __call__(self, *operands: Any) -> Any:
        """As `Offer.run`."""
        with self.context(self.kernel, self.config):
            return self.run(*operands)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """One way to compute. Every backend gives the reference's codes, scales and values bit for bit,
    and products within its stated bound of the exact ones.

    Attributes:
      name: what `only_backend` and `explain` call it.
      epsilon_bound: c in `|C - exact| <= c * 2^-24 * sqrt(k) * sum |a b|` for float32 products.
      table: what it offers, a row for each kind of call; of any other it says that it does not.
      source: files that decide what its kernels compute: what was measured of others does not
        count. None: nothing is measured of it.
      kernel: name of the kernel that takes a call on a machine, where it has several.
      configs: what else that kernel may be told for a call, the most promising first.
      configured: a context in which a kernel, by its name, computes as it is told; it enters jit's
        cache key.
    """

    name: str
    epsilon_bound: float
    table: tuple[Offer, ...]
    source: Callable[[], Iterable[Path]] | None = None
    kernel: Callable[[Call, Target], str] = lambda call, target: ""
    configs: Callable[[Call, Target], Iterable[Config]] = lambda call, target: ()
    configured: Callable[[str, Config], AbstractContextManager[None]] = lambda kernel, config: (
        contextlib.nullcontext()
    )

    @functools.cached_property
    def offers(self) -> Mapping[type[Call], Offer]:
        """The table by the kind of call."""
        return {offer.call: offer for offer in self.table}

    def offer(self, call: Call, kernel: str = "", config: Config = ()) -> Offer:
        """Its row for a call that it takes, computed as a kernel is told."""
        offer = self.offers[type(call)]
        if not config:
            return offer
        run = Configured(run=offer.run, context=self.configured, kernel=kernel, config=config)
        return dataclasses.replace(offer, run=run)

    def rejects(self, call: Call, target: Target) -> str | None:
        """Why a call is not taken on a machine, or None."""
        offer = self.offers.get(type(call))
        return NOT_OFFERED[type(call)] if offer is None else offer.rejects(call, target)

    def run(self, call: Call, *operands: Any) -> Any:
        """What a call that is not rejected asks for: see `Offer.run`."""
        return self.offers[type(call)].run(*operands, call)
