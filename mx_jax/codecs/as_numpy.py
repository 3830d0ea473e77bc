"""`np.asarray` of codes, which gives values: a word where a writer of files asks for them."""

import sys
import warnings
from typing import Any

import numpy as np

# Modules that ask for an array to write it; packages stand for all that is in them.
_WRITERS = ("numpy.lib.npyio", "numpy.lib._npyio_impl", "safetensors", "h5py")


class AsNumpy:
    """Base of arrays of codes: NumPy gets their values."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        _warn_of_a_writer(type(self).__name__)
        values: Any = self
        return np.asarray(values.dequantize(), dtype=dtype)


def _warn_of_a_writer(name: str) -> None:
    """Warn, once for a line of the user's, if what asks for the values writes files."""
    frame: Any = sys._getframe(2)
    level = 3
    if not _writes(frame):
        return
    while frame.f_back is not None and _writes(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(
        f"{name}: its values are written, several times as large as its codes, and are no "
        f"{name} when they are read; mx_jax.checkpoint.save keeps the codes, to_wire gives plain "
        "arrays of them for other writers; for the values on purpose write x.dequantize()",
        stacklevel=level,
    )


def _writes(frame: Any) -> bool:
    module = frame.f_globals.get("__name__", "")
    return any(module == writer or module.startswith(f"{writer}.") for writer in _WRITERS)
