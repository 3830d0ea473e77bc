"""Budgets for a choice of formats, and the best choice under one: a knapsack, solved exactly."""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """What a choice of formats may cost: one of three limits.

    Attributes:
      bytes: of all layers that are chosen for, together.
      bits: the same as an average over their parameters, scales included: 4.5 allows some layers
        eight bits where the others have four.
      loss: how far the mean loss may rise, in the loss's own units.

    Raises:
      ValueError: none of the limits, several, or one that is not positive.

    Examples:
      >>> import mx_jax
      >>> mx_jax.inspect.Budget(bits=4.5).bits
      4.5
    """

    bytes: float | None = None
    bits: float | None = None
    loss: float | None = None

    def __post_init__(self):
        limits = {name: value for name, value in vars(self).items() if value is not None}
        if len(limits) != 1 or not min(limits.values()) > 0:
            shown = ", ".join(f"{name}={value}" for name, value in limits.items()) or "none"
            raise ValueError(
                "Budget: needs exactly one of bytes, bits and loss, a positive number, got "
                f"{shown}; e.g. Budget(bits=4.5)"
            )

    def __str__(self) -> str:
        if self.loss is not None:
            return f"loss may rise by {self.loss:g}"
        if self.bits is not None:
            return f"{self.bits:g} bits a parameter"
        return f"{self.bytes:,.0f} bytes"


def best_choice(
    costs: Sequence[Sequence[float]], sizes: Sequence[Sequence[float]], limit: float
) -> list[int] | None:
    """One option for each item, of the least summed cost, whose sizes add up to the limit at most.

    The multiple-choice knapsack problem, as a linear program in whole numbers.

    Args:
      costs: of each item's options.
      sizes: of each item's options, in whatever unit.
      limit: of the sum of sizes.

    Returns:
      The index of each item's option; None where even the smallest do not fit.

    Examples:
      >>> from mx_jax.inspect.budget import best_choice
      >>> best_choice([[5, 0], [1, 0]], [[1, 3], [1, 3]], 4)
      [1, 0]
    """
    from scipy import optimize, sparse  # takes half a second to import

    smallest = sum(min(own) for own in sizes)
    if smallest > limit:
        return None
    numbers = [len(own) for own in costs]
    item = np.repeat(np.arange(len(numbers)), numbers)
    flat_costs, flat_sizes = (np.concatenate([*map(np.asarray, own)]) for own in (costs, sizes))
    # In units of what there is to decide about, so that tolerances mean the same everywhere.
    spread, unit = (float(own.max()) or 1.0 for own in (flat_costs, flat_sizes))
    # Of equally good choices the smallest one.
    goal = flat_costs / spread + 1e-6 * flat_sizes / unit
    one_each = sparse.csr_matrix((np.ones(len(item)), (item, np.arange(len(item)))))
    found = optimize.milp(
        goal,
        integrality=np.ones(len(item)),
        bounds=optimize.Bounds(0, 1),
        constraints=[
            optimize.LinearConstraint(one_each, 1, 1),
            optimize.LinearConstraint(flat_sizes[None] / unit, -np.inf, limit / unit),
        ],
    )
    taken = np.flatnonzero(np.round(found.x))
    starts = np.cumsum([0, *numbers[:-1]])
    return [int(index - start) for index, start in zip(taken, starts, strict=True)]
