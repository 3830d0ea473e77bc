"""The recipe of each step of a training run, e.g. another for the last tenth. Copy this file.

A recipe is static under `jit`, so ask for the step's recipe outside, and pass it as a static
argument: one program for each phase is compiled, and no more.

    schedule = heal("mxfp4", steps=1000)
    step = jax.jit(train_step, static_argnames="recipe")
    for i in range(1000):
        state = step(state, batches[i], recipe=schedule.at(i))
"""

import dataclasses
import itertools
import math
import operator
from collections.abc import Sequence
from typing import SupportsIndex

from mx_jax import recipes
from mx_jax.recipes import Recipe


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Recipes by step: each phase has one, from its first step to the next phase's.

    Attributes:
      phases: (first step, recipe) of each, in order; the first one starts at step 0. A name stands
        for its recipe.
    """

    phases: Sequence[tuple[int, Recipe | str]]

    def __post_init__(self):
        starts = [operator.index(start) for start, _ in self.phases]
        if starts[:1] != [0] or any(a >= b for a, b in itertools.pairwise(starts)):
            raise ValueError(
                f"Schedule: phases must start at step 0 and ascend, got first steps {starts}; e.g. "
                "[(0, 'mxfp4'), (900, 'high_precision')]"
            )
        named = (recipes.from_name(r) if isinstance(r, str) else r for _, r in self.phases)
        object.__setattr__(self, "phases", tuple(zip(starts, named, strict=True)))

    def at(self, step: SupportsIndex) -> Recipe:
        """The recipe of one step, counted from 0."""
        step = operator.index(step)
        if step < 0:
            raise ValueError(f"Schedule.at: steps count from 0, got step={step}")
        *_, recipe = (recipe for start, recipe in self.phases if start <= step)
        assert isinstance(recipe, Recipe)
        return recipe


def heal(
    recipe: Recipe | str, steps: int, *, last: float = 0.1, by: Recipe | str = "high_precision"
) -> Schedule:
    """A schedule that ends in another recipe, which heals what the first one cost.

    Args:
      recipe: of the steps before.
      steps: of the whole run.
      last: the part of them that heals, 0 to 1, rounded up to whole steps.
      by: the recipe of that part; the default multiplies in the dtype of its operands.
    """
    if steps < 1 or not 0 <= last <= 1:
        raise ValueError(
            f"heal: needs steps >= 1 and 0 <= last <= 1, got steps={steps}, last={last}; last is a "
            "part, as 0.1 for the last tenth"
        )
    # 0.07 * 100 is a little more than 7.
    start = steps - math.ceil(round(last * steps, 6))
    phases = (
        [(0, recipe), (start, by)] if 0 < start < steps else [(0, by if start == 0 else recipe)]
    )
    return Schedule(phases)
