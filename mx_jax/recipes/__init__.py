"""Named recipes: functions that return a frozen Recipe."""

from types import ModuleType as _ModuleType
from typing import NoReturn as _NoReturn

from mx_jax.formats.removed import missing_attribute as _missing_attribute
from mx_jax.ops.arguments import NAMED as _NAMED
from mx_jax.ops.arguments import named_recipe as _named_recipe
from mx_jax.recipes.base import Recipe as Recipe
from mx_jax.recipes.named import deepseek_v3 as deepseek_v3
from mx_jax.recipes.named import deepseek_v3_1 as deepseek_v3_1
from mx_jax.recipes.named import float8_rowwise as float8_rowwise
from mx_jax.recipes.named import float8_rowwise_with_gw_hp as float8_rowwise_with_gw_hp
from mx_jax.recipes.named import float8_tensorwise as float8_tensorwise
from mx_jax.recipes.named import high_precision as high_precision
from mx_jax.recipes.named import int8_rowwise as int8_rowwise
from mx_jax.recipes.named import mxfp4 as mxfp4
from mx_jax.recipes.named import mxfp4_backward as mxfp4_backward
from mx_jax.recipes.named import mxfp4_hadamard as mxfp4_hadamard
from mx_jax.recipes.named import mxfp4_stochastic as mxfp4_stochastic
from mx_jax.recipes.named import mxfp6 as mxfp6
from mx_jax.recipes.named import mxfp6_e2m3 as mxfp6_e2m3
from mx_jax.recipes.named import mxfp8 as mxfp8
from mx_jax.recipes.named import mxfp8_hybrid as mxfp8_hybrid
from mx_jax.recipes.named import mxint8 as mxint8
from mx_jax.recipes.named import nvfp4 as nvfp4
from mx_jax.recipes.named import nvfp4_four_over_six as nvfp4_four_over_six
from mx_jax.recipes.named import nvfp4_pretraining as nvfp4_pretraining
from mx_jax.recipes.named import nvfp4_unbiased as nvfp4_unbiased
from mx_jax.recipes.named import qat as qat
from mx_jax.recipes.named import weight_only as weight_only
from mx_jax.reference.hadamard import Hadamard as Hadamard
from mx_jax.specs import MatmulSpec as MatmulSpec
from mx_jax.specs import OperandSpec as OperandSpec
from mx_jax.specs import Residuals as Residuals
from mx_jax.specs import operand as operand


def names() -> tuple[str, ...]:
    """Names that `from_name` knows, torchao's for float8 last.

    Examples:
      >>> from mx_jax import recipes
      >>> recipes.names()[:3], "rowwise" in recipes.names()
      (('high_precision', 'mxfp8', 'mxfp8_hybrid'), True)
    """
    return tuple(_NAMED)


def from_name(name: str) -> Recipe:
    """The named recipe that takes no arguments.

    Wherever a recipe is taken, its name is too.

    Raises:
      ValueError: unknown name; the message lists the known.

    Examples:
      >>> from mx_jax import recipes
      >>> recipes.from_name("mxfp8") == recipes.mxfp8()
      True
    """
    recipe = _named_recipe(name)
    assert isinstance(recipe, Recipe)
    return recipe


def __getattr__(name: str) -> _NoReturn:
    raise _missing_attribute(__name__, name)


def __dir__() -> list[str]:
    public = (name for name, value in globals().items() if not isinstance(value, _ModuleType))
    return sorted(name for name in public if not name.startswith("_"))
