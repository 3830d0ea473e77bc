"""Where quantized tensors lie on a mesh, and how they get to where they are multiplied."""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from mx_jax.formats.removed import missing_attribute as _missing_attribute
from mx_jax.sharding.movement import Gather as Gather
from mx_jax.sharding.movement import Specs as Specs
from mx_jax.sharding.movement import device_put as device_put
from mx_jax.sharding.movement import spec_for as spec_for

if _TYPE_CHECKING:
    from mx_jax.sharding.exchange import Dispatched as Dispatched
    from mx_jax.sharding.exchange import dispatch as dispatch

# Imported when one of them is first used.
_LATE = ("Dispatched", "dispatch")


def __getattr__(name: str) -> _Any:
    if name in _LATE:
        return getattr(_importlib.import_module(f"{__name__}.exchange"), name)
    raise _missing_attribute(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE})
