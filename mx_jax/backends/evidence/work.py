"""What a measurement stands for: a kind of call, and the sizes that it speaks of."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from mx_jax.backends.calls import (
    Call,
    MatmulCall,
    PackCall,
    QuantizeBothCall,
    QuantizeCall,
    RaggedCall,
)
from mx_jax.formats import WHOLE, BlockFormat, ElementFormat, ScaleFormat

Kind = Literal["product", "ragged product", "ragged sums", "cast", "cast both ways"]
# Largest rows of each bucket. Kernels change their tiles at 8, 16, 32 and 64, and may decode the
# weights for XLA's product from 256 or 1024 rows on: a bucket never spans such a change.
ROWS = (1, 8, 16, 32, 64, 255, 1023, math.inf)
# Most elements of each class of sizes.
SIZES = (2**20, 2**22, 2**24, 2**26, 2**28, math.inf)

# Most groups of each class of mixtures.
GROUPS = (8, 32, 128, math.inf)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Calls that one measurement stands for.

    Attributes:
      kind: of call.
      formats: of lhs and rhs, None for high precision; of the cast, or of both.
      dtypes: of lhs and rhs, None where quantized, and of the product; of what is cast.
      packed: whether the backend itself packed the weights.
      axes: that blocks of casts lie along, from the end.
      rows: of the activations, at most, in groups of a group on average; any number for casts.
      size: elements of all weights, or of what is cast, at most.
      groups: of rows, each with a matrix of its own, or a sum, at most; 0 where there are none.
    """

    kind: Kind
    formats: tuple[BlockFormat | None, ...]
    dtypes: tuple[np.dtype | None, ...]
    packed: bool = False
    axes: tuple[int, ...] = ()
    rows: float = math.inf
    size: float = math.inf
    groups: float = 0

    @classmethod
    def of(cls, call: Call, backend: str) -> "Work | None":
        """What a call is for a backend; None of what nobody measures, such as batches.

        Args:
          call: of constant sizes.
          backend: its name: weights that another one packed are not packed for it.
        """
        describe = DESCRIBE.get(type(call))
        return None if describe is None else describe(call, backend)

    def serves(self, call: PackCall) -> bool:
        """Whether it is a product by weights that such a call packs, of any number of rows.

        Its dtype has to be theirs: weights of a float32 model meet float32 activations, for which
        they would be unpacked again.
        """
        batch = [call.weights.shape[axis] for axis in call.weights.axes.batch]
        return (
            self.packed
            and self.formats == (call.lhs_format, call.format)
            and call.dtype in (None, self.dtypes[-1])
            and self.size == least(SIZES, math.prod(call.weights.shape))
            and self.groups == (least(GROUPS, math.prod(batch)) if batch else 0)
        )

    @property
    def lowest_rows(self) -> int:
        """The least rows that it speaks of."""
        return next((int(end) + 1 for end in reversed(ROWS) if end < self.rows), 1)

    def __str__(self) -> str:
        names = ["bf16" if own is None else own.name for own in self.formats]
        if self.groups:
            what = "rows" if self.kind == "ragged product" else "sums"
            most = f"up to {self.groups} groups" if self.groups < math.inf else "many groups"
            return " x ".join(names) + f", {what} in {most}" + ", packed" * self.packed
        if self.kind == "product":
            return " x ".join(names) + ", packed" * self.packed
        along = " and ".join({-1: "rows", -2: "columns"}.get(a, f"axis {a}") for a in self.axes)
        return f"{self.dtypes[0]} to {names[0]}, blocks along {along}"


def least(limits: tuple[float, ...], size: int) -> float:
    """The least of some limits that a size does not exceed."""
    return next(limit for limit in limits if size <= limit)


def _product(call: MatmulCall, backend: str) -> Work | None:
    if call.num_batch:
        return None
    swapped = call.rhs.format is None
    weights, activations = (call.lhs, call.rhs) if swapped else (call.rhs, call.lhs)
    return Work(
        kind="product",
        formats=(call.lhs.format, call.rhs.format),
        dtypes=(call.lhs.dtype, call.rhs.dtype, call.out_dtype),
        packed=call.rhs.packed_by == backend,
        rows=least(ROWS, activations.rows),
        size=least(SIZES, math.prod(weights.shape)),
    )


def _ragged(call: RaggedCall, backend: str) -> Work:
    (rows, *_), groups = call.lhs.shape, max(call.num_groups, 1)
    return Work(
        kind="ragged sums" if call.contracts_rows else "ragged product",
        formats=(call.lhs.format, call.rhs.format),
        dtypes=(call.lhs.dtype, call.rhs.dtype, call.out_dtype),
        packed=call.rhs.packed_by == backend,
        rows=least(ROWS, -(-rows // groups)),
        size=least(SIZES, math.prod(call.rhs.shape)),
        groups=least(GROUPS, groups),
    )


def _both(call: QuantizeBothCall, backend: str) -> Work | None:
    if call.first.blocks == call.second.blocks:
        return None
    return _casts("cast both ways", call.first, call.second)


def _casts(kind: Kind, *calls: QuantizeCall) -> Work:
    return Work(
        kind=kind,
        formats=tuple(call.format for call in calls),
        dtypes=(calls[0].dtype,),
        axes=tuple(axis for call in calls for axis, _ in call.blocks),
        size=least(SIZES, math.prod(calls[0].shape)),
    )


# How each kind of call is described to backends' rows; another kind of call is another line.
DESCRIBE: Mapping[type[Call], Callable[[Any, str], Work | None]] = {
    MatmulCall: _product,
    RaggedCall: _ragged,
    QuantizeCall: lambda call, backend: _casts("cast", call),
    QuantizeBothCall: _both,
}


def as_json(work: Work) -> dict[str, Any]:
    """Facts, no names that a later version may give another meaning."""
    return {
        "kind": work.kind,
        "formats": [None if own is None else _facts(own) for own in work.formats],
        "dtypes": [None if dtype is None else dtype.name for dtype in work.dtypes],
        "packed": work.packed,
        "axes": list(work.axes),
        "rows": None if math.isinf(work.rows) else work.rows,
        "size": None if math.isinf(work.size) else work.size,
        "groups": None if math.isinf(work.groups) else work.groups,
    }


def from_json(facts: dict[str, Any]) -> Work:
    """What `as_json` wrote; KeyError, TypeError or ValueError of anything else."""
    return Work(
        kind=facts["kind"],
        formats=tuple(None if own is None else _format(own) for own in facts["formats"]),
        dtypes=tuple(None if name is None else np.dtype(name) for name in facts["dtypes"]),
        packed=bool(facts["packed"]),
        axes=tuple(int(axis) for axis in facts["axes"]),
        rows=math.inf if facts["rows"] is None else int(facts["rows"]),
        size=math.inf if facts["size"] is None else int(facts["size"]),
        groups=math.inf if facts["groups"] is None else int(facts["groups"]),
    )


def _facts(format: BlockFormat) -> dict[str, Any]:
    block = [size.value if size is WHOLE else size for size in format.block]
    return dataclasses.asdict(format) | {"block": block}


def _format(facts: dict[str, Any]) -> BlockFormat:
    scale = dict(facts["scale"])
    if scale["element"] is not None:
        scale["element"] = ElementFormat(**scale["element"])
    kept, contracting = (WHOLE if size == WHOLE.value else size for size in facts["block"])
    parts = {"element": ElementFormat(**facts["element"]), "scale": ScaleFormat(**scale)}
    return BlockFormat(**{**facts, **parts, "block": (kept, contracting)})
