"""Saying in an error which layer it comes from."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def named_in_errors(layer: str) -> Iterator[None]:
    """Add a note to the errors of a product: a kernel that its recipe cannot use, a missing key.

    Args:
      layer: what the layer is called.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        error.add_note(f"in layer {layer}")
        raise
