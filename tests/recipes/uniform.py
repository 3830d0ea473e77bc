"""A recipe of one kind of operand, for tests that are about something else."""

from typing import Any

from mx_jax.recipes import MatmulSpec, OperandSpec, Recipe, Residuals


def uniform(spec: OperandSpec | None, name: str = "uniform", **fields: Any) -> Recipe:
    both = MatmulSpec(lhs=spec, rhs=spec)
    given = {"fwd": both, "dlhs": both, "drhs": both, "residuals": Residuals.PRIMAL}
    return Recipe(name=name, **(given | fields))
