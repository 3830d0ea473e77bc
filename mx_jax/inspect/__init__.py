"""Making quantization visible: what it does as programs run, and how products are computed."""

from typing import NoReturn as _NoReturn

from mx_jax.formats.removed import missing_attribute as _missing_attribute
from mx_jax.inspect.capture import Captured as Captured
from mx_jax.inspect.capture import NonFiniteError as NonFiniteError
from mx_jax.inspect.capture import capture as capture
from mx_jax.inspect.capture import guard as guard
from mx_jax.inspect.explain import Explanation as Explanation
from mx_jax.inspect.explain import explain as explain
from mx_jax.inspect.records import Record as Record
from mx_jax.inspect.records import Records as Records
from mx_jax.inspect.records import Tag as Tag
from mx_jax.inspect.statistics import STATISTICS as STATISTICS
from mx_jax.inspect.statistics import sqnr_db as sqnr_db


def __getattr__(name: str) -> _NoReturn:
    raise _missing_attribute(__name__, name)
