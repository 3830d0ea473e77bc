"""A recipe of one kind of operand, for tests that are about something else."""

from typing import Any

from mx_jax.recipes import MatmulSpec, OperandSpec, Recipe, Residuals


def uniform(spec: OperandSpec | None, name: str = "uniform", **fields: Any) -> Recipe:
    both = MatmulSpec(lhs=spec, rhs=spec)
    products = dict.fromkeys(("output", "grad_input", "grad_weight"), both)
    return Recipe(name=name, **(products | {"residuals": Residuals.PRIMAL} | fields))
