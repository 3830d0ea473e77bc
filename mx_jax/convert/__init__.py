"""Converting models that know nothing of recipes, by rules, and back."""

from typing import NoReturn as _NoReturn

from mx_jax.convert.functions import function as function
from mx_jax.convert.linen_model import linen as linen
from mx_jax.convert.model import original as original
from mx_jax.convert.model import report as report
from mx_jax.convert.nnx_model import nnx as nnx
from mx_jax.convert.products import Conv as Conv
from mx_jax.convert.products import DotGeneral as DotGeneral
from mx_jax.convert.products import RaggedDot as RaggedDot
from mx_jax.convert.rules import AutoFilter as AutoFilter
from mx_jax.convert.rules import Decision as Decision
from mx_jax.convert.rules import Layer as Layer
from mx_jax.convert.rules import Report as Report
from mx_jax.convert.rules import Rule as Rule
from mx_jax.convert.rules import UnusedRuleWarning as UnusedRuleWarning
from mx_jax.convert.rules import gains as gains
from mx_jax.convert.weights import weights as weights
from mx_jax.convert.weights import weights_report as weights_report
from mx_jax.formats.removed import missing_attribute as _missing_attribute


def __getattr__(name: str) -> _NoReturn:
    raise _missing_attribute(__name__, name)
