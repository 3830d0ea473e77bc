"""Attributes of a layer that are other things for the length of a call."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def lent(layer: Any, loans: dict[str, Any]) -> Iterator[None]:
    """Set attributes of a layer, past Flax's checks, and put back what was there.

    Args:
      layer: of flax.linen, the clone that is bound for a call, which no other thread has.
      loans: by name.
    """
    own = vars(layer)
    before = {name: own[name] for name in loans if name in own}
    for name, value in loans.items():
        object.__setattr__(layer, name, value)
    try:
        yield
    finally:
        for name in loans:
            if name in before:
                object.__setattr__(layer, name, before[name])
            else:
                # A method of the class, which the loan stood before.
                object.__delattr__(layer, name)
