"""What `explain` found of a function: a row for each cast and product, and a table of them."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from mx_jax.backends.calls import (
    AttendCall,
    Call,
    CastStatisticsCall,
    DequantizeCall,
    MatmulCall,
    OperandType,
    PackCall,
    QuantizeBothCall,
    QuantizeCall,
    RaggedCall,
    TransformCall,
)
from mx_jax.backends.select import Selection
from mx_jax.inspect.jaxpr_products import Place


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Equal casts or products of a function.

    Attributes:
      kind: "product", "ragged product", "cast", "dequantize", "pack", or "high precision" of a
        product that no backend was asked for.
      work: what is computed, in words; shapes and axes as the arrays lie, below `jax.vmap` of
        something jitted those of one lane.
      backend: who computes it; "jax.lax" in high precision.
      times: how often, each step of a scan counted: as the jaxpr has it. XLA may drop some; of
        `flax.linen.scan`, which traces its body once more, gradients show one too many.
      places: where: scopes joined by `/`, such as Flax's layers, and whether for a gradient.
      flops: of one; 0 of casts.
      bytes: read and written by one: codes and scales as stored in bits, values by their dtype.
      why: of high precision: why.
      how: how the backend computes it, where its name does not say.
      selection: the decision: why other backends do not take it, which would if they were named,
        and the measurement it rests on; None in high precision.
    """

    kind: str
    work: str
    backend: str
    times: int
    places: tuple[Place, ...]
    flops: float
    bytes: float
    why: str = ""
    how: str = ""
    selection: Selection | None = None

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why no other backend computes it, what it rests on, and which would take it if named."""
        if (own := self.selection) is None:
            return (self.why,)
        proof = () if own.evidence is None else (f"{own.backend}: {own.evidence}",)
        rejected = (f"not {name}: {reason}" for name, reason in own.rejections)
        named = (f"{name} takes it if named: {why}" for name, why in own.on_request)
        return (*proof, *rejected, *named)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """Each cast and product of a function: who computes it, why, and what it costs. Print it.

    Attributes:
      rows: in the order of the trace; products in high precision last.
      remarks: what is done besides, such as weights that are unpacked at every call.
      machine: what selection was asked for.

    Examples:
      >>> import jax, mx_jax
      >>> x, w = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 64), (64, 64)))
      >>> found = mx_jax.inspect.explain(lambda x, w: mx_jax.matmul(x, w, recipe="mxfp8") @ w, x, w)
      >>> [row.kind for row in found.rows], len(found.high), found.quantized_share
      (['cast', 'cast', 'product', 'high precision'], 1, 0.5)
    """

    rows: tuple[Row, ...]
    remarks: tuple[str, ...]
    machine: str

    @property
    def high(self) -> tuple[Row, ...]:
        """The products that stayed in high precision."""
        return tuple(row for row in self.rows if row.selection is None)

    @property
    def quantized_share(self) -> float:
        """The share of all flops of products that is quantized, 0 to 1."""
        flops = sum(row.times * row.flops for row in self.rows)
        high = sum(row.times * row.flops for row in self.high)
        return 1 - high / flops if flops else 0.0

    @property
    def summary(self) -> str:
        """The machine, and how much is quantized."""
        return f"{self.machine}; {100 * self.quantized_share:.3g} % of the flops are quantized"

    def __str__(self) -> str:
        lines = []
        for row in self.rows:
            how = f" ({row.how})" if row.how else ""
            lines.append(f"{row.times} x {row.work} -> {row.backend}{how}")
            lines.append(f"  {_cost(row)}; in {_places(row)}")
            lines += [f"  {reason}" for reason in row.reasons]
        return "\n".join([*lines, *self.remarks, self.summary])

    def __rich__(self) -> Group:
        """A table, and below it the reasons, each once: most rows share theirs."""
        table = Table(title="Casts and products", title_justify="left", box=SIMPLE_HEAD)
        for name in ("where", "what", "times", "backend", "Mflop", "kB", "why"):
            numbers = name in ("times", "Mflop", "kB")
            table.add_column(name, justify="right" if numbers else "left", overflow="fold")
        notes: dict[str, int] = {}
        for row in self.rows:
            texts = (*filter(None, (row.how,)), *row.reasons)
            why = ", ".join(str(notes.setdefault(text, len(notes) + 1)) for text in texts)
            table.add_row(
                escape(_places(row)),
                escape(row.work),
                str(row.times),
                row.backend,
                f"{row.flops / 1e6:.4g}" if row.flops else "",
                f"{row.bytes / 1e3:.4g}",
                why,
                style=None if row.selection else "dim",
            )
        lines = (*(f"{number}: {text}" for text, number in notes.items()), *self.remarks)
        return Group(table, *map(escape, lines), escape(self.summary))


def _places(row: Row) -> str:
    texts = (
        f"{place.path or 'the function'}{' (gradient)' * place.backward}" for place in row.places
    )
    return ", ".join(dict.fromkeys(texts))


def _cost(row: Row) -> str:
    flops = f"{row.flops / 1e6:.4g} Mflop, " if row.flops else ""
    return f"{flops}{row.bytes / 1e3:.4g} kB"


def kind_of(call: Call) -> str:
    """What a call is, in a word or two."""
    return next(kind for own, (kind, _) in _KINDS.items() if isinstance(call, own))


def cost_of(call: Call) -> tuple[float, float]:
    """Floating point operations of a call, and the bytes that it reads and writes."""
    return next(cost(call) for own, (_, cost) in _KINDS.items() if isinstance(call, own))


def _stored(operand: OperandType) -> float:
    size = float(math.prod(operand.shape))
    if operand.format is not None:
        return size * operand.format.bits_per_element / 8
    return size * (0 if operand.dtype is None else operand.dtype.itemsize)


def _product(call: MatmulCall) -> tuple[float, float]:
    columns = call.rhs.rows
    batch = math.prod(call.lhs.shape[axis] for axis in call.lhs.axes.batch)
    out = float(batch * call.lhs.rows * columns)
    flops = 2.0 * math.prod(call.lhs.shape) * columns
    return flops, _stored(call.lhs) + _stored(call.rhs) + out * call.out_dtype.itemsize


def _ragged(call: RaggedCall) -> tuple[float, float]:
    rows = call.lhs.rows
    columns = call.rhs.shape[-1] if call.contracts_rows else call.rhs.rows
    out = float(rows * columns * (call.num_groups if call.contracts_rows else 1))
    flops = 2.0 * math.prod(call.lhs.shape) * columns
    return flops, _stored(call.lhs) + _stored(call.rhs) + out * call.out_dtype.itemsize


def _cast(call: QuantizeCall) -> tuple[float, float]:
    size = float(math.prod(call.shape))
    return 0.0, size * (call.dtype.itemsize + call.format.bits_per_element / 8)


def _both(call: QuantizeBothCall) -> tuple[float, float]:
    second = math.prod(call.second.shape) * call.second.format.bits_per_element / 8
    return 0.0, _cast(call.first)[1] + second


def _dequantize(call: DequantizeCall) -> tuple[float, float]:
    size = float(math.prod(call.shape))
    return 0.0, size * (call.dtype.itemsize + call.format.bits_per_element / 8)


def _attend(call: AttendCall) -> tuple[float, float]:
    matrices, length, features = map(float, call.keys)
    size = call.dtypes[1].itemsize
    held = size if call.format is None else call.format.bits_per_element / 8
    moved = 2 * matrices * features * (call.queries[1] * size + length * held)
    return 4.0 * matrices * call.queries[1] * length * features, moved


def _statistics(call: CastStatisticsCall) -> tuple[float, float]:
    size = float(math.prod(call.shape))
    return 0.0, size * (call.dtype.itemsize + call.format.bits_per_element / 8)


def _transform(call: TransformCall) -> tuple[float, float]:
    size = float(math.prod(call.shape))
    return 0.0, size * (call.dtype.itemsize + 4)


# What each kind of call is called, and costs; another kind is another line.
_KINDS: Mapping[type[Any], tuple[str, Callable[[Any], tuple[float, float]]]] = {
    MatmulCall: ("product", _product),
    RaggedCall: ("ragged product", _ragged),
    QuantizeCall: ("cast", _cast),
    QuantizeBothCall: ("cast", _both),
    DequantizeCall: ("dequantize", _dequantize),
    PackCall: ("pack", lambda call: (0.0, 2 * _stored(call.weights))),
    AttendCall: ("attention", _attend),
    CastStatisticsCall: ("statistics", _statistics),
    TransformCall: ("transform", _transform),
}
