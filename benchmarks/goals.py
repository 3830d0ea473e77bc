"""How a goal's verdict is worked out and said, on CPUs and GPUs alike."""


def missed_by(reached: float | None, goal: float) -> float | None:
    """The share of a goal that is missing; None unless it was measured and missed."""
    return None if reached is None or reached >= goal else 1 - reached / goal


def verdict(reached: float | None, goal: float, why: str) -> str:
    """A goal in words: met, missed, or why it was not measured."""
    if reached is None:
        return f"not measured here: {why}"
    missing = missed_by(reached, goal)
    return "met" if missing is None else f"missed by {100 * missing:.3g} %"
