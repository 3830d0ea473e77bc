"""Quantized weights on disk: codes at their real width, and beside them what they are."""

from typing import NoReturn as _NoReturn

from mx_jax.checkpoint.foreign import read as read
from mx_jax.checkpoint.foreign import write as write
from mx_jax.checkpoint.layouts import LAYOUTS as LAYOUTS
from mx_jax.checkpoint.layouts import Layout as Layout
from mx_jax.checkpoint.layouts import quantization_config as quantization_config
from mx_jax.checkpoint.scales import Plausibility as Plausibility
from mx_jax.checkpoint.scales import plausibility as plausibility
from mx_jax.checkpoint.transcoding import transcode as transcode
from mx_jax.checkpoint.weights import Stored as Stored
from mx_jax.checkpoint.weights import Weights as Weights
from mx_jax.checkpoint.wire import from_packed as from_packed
from mx_jax.checkpoint.wire import from_wire as from_wire
from mx_jax.checkpoint.wire import load as load
from mx_jax.checkpoint.wire import save as save
from mx_jax.checkpoint.wire import to_wire as to_wire
from mx_jax.formats.removed import missing_attribute as _missing_attribute


def __getattr__(name: str) -> _NoReturn:
    raise _missing_attribute(__name__, name)
