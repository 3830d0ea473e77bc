"""Schedule: the recipe of each step of a training run, e.g. another for the last tenth."""

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import SupportsIndex

from mx_jax.ops.arguments import as_recipe
from mx_jax.recipes.base import Recipe


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Recipes by step: each phase has one, from its first step to the next phase's.

    A recipe is static under `jit`, so the step's recipe is asked for outside and passed as a static
    argument: one program for each phase is compiled, and no more.

    Attributes:
      phases: (first step, recipe) of each, in order; the first one starts at step 0. A name stands
        for its recipe.

    Raises:
      ValueError: no phase, a first one that does not start at 0, steps that do not ascend, or an
        unknown name.
      TypeError: what is no pair of an int and a recipe.

    Examples:
      >>> from mx_jax import recipes
      >>> schedule = recipes.Schedule([(0, "mxfp8"), (100, "mxfp4"), (900, "high_precision")])
      >>> schedule.at(0).name, schedule.at(899).name, schedule.at(900).name
      ('mxfp8', 'mxfp4', 'high_precision')
    """

    phases: Sequence[tuple[int, Recipe | str]]

    def __post_init__(self):
        phases: list[tuple[int, Recipe]] = []
        if not isinstance(self.phases, Iterable):
            raise TypeError(
                f"Schedule: phases must be pairs of a first step and a recipe, got "
                f"phases={self.phases!r}; e.g. [(0, 'mxfp4'), (900, 'high_precision')]"
            )
        for phase in self.phases:
            try:
                start, recipe = phase
                start = operator.index(start)
            except (TypeError, ValueError):
                raise TypeError(
                    "Schedule: a phase is a pair of its first step and a recipe, got "
                    f"phase={phase!r}; e.g. (900, 'high_precision')"
                ) from None
            phases.append((start, as_recipe(recipe, "Schedule", Recipe)))
        starts = [start for start, _ in phases]
        if starts[:1] != [0] or any(a >= b for a, b in itertools.pairwise(starts)):
            raise ValueError(
                f"Schedule: phases must start at step 0 and ascend, got first steps {starts}; e.g. "
                "[(0, 'mxfp4'), (900, 'high_precision')]"
            )
        object.__setattr__(self, "phases", tuple(phases))

    def at(self, step: SupportsIndex) -> Recipe:
        """The recipe of one step, counted from 0.

        Raises:
          TypeError: a step that is no int, as any that `jit` traces.
          ValueError: a negative step.
        """
        try:
            step = operator.index(step)
        except TypeError:
            raise TypeError(
                f"Schedule.at: step must be an int, got step={step!r}; ask outside jit, and pass "
                "the recipe as a static argument: jax.jit(train_step, static_argnames='recipe') "
                "compiles once for each phase"
            ) from None
        if step < 0:
            raise ValueError(f"Schedule.at: steps count from 0, got step={step}")
        *_, recipe = (recipe for start, recipe in self.phases if start <= step)
        assert isinstance(recipe, Recipe)
        return recipe

    def __str__(self) -> str:
        names = (
            f"{as_recipe(recipe, 'Schedule').name} from {start}" for start, recipe in self.phases
        )
        return ", ".join(names)


def heal(
    recipe: Recipe | str, steps: int, *, last: float = 0.1, by: Recipe | str = "high_precision"
) -> Schedule:
    """A schedule that ends in another recipe, which heals what the first one cost.

    Args:
      recipe: of the steps before.
      steps: of the whole run.
      last: the part of them that heals, 0 to 1, rounded up to whole steps.
      by: the recipe of that part; the default multiplies in the dtype of its operands.

    Raises:
      ValueError: a part outside 0 to 1, a number of steps below 1, or an unknown name.
      TypeError: steps that are no int, or a part that is no number.

    Examples:
      >>> from mx_jax import recipes
      >>> print(recipes.heal("mxfp4", steps=1000))
      mxfp4 from 0, high_precision from 900
    """
    try:
        steps, last = operator.index(steps), float(last)
    except (TypeError, ValueError):
        raise TypeError(
            f"heal: steps must be an int and last a part of them, got steps={steps!r}, "
            f"last={last!r}; e.g. steps=1000, last=0.1"
        ) from None
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
