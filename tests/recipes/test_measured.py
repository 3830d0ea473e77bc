"""What is said of rules, against what they do to drawn blocks."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax.formats import MXFP4, BlockFormat, block_format
from mx_jax.recipes.base import clips
from mx_jax.reference.scale_rules import SCALE_RULES, ScaleRule, power_of_two

FORMATS = "mxfp8_e4m3 mxfp8_e5m2 mxfp6_e2m3 mxfp4 mxint8 nvfp4 float8_rowwise_e4m3".split()
# A rule that corrects its scales afterwards has left room before.
OF_THE_LIBRARY = [
    (rule, block_format(name))
    for name in FORMATS
    for rule in SCALE_RULES
    if block_format(name).scale.kind in rule.kinds and rule.correction is None
]
CUSTOM = [
    (power_of_two(f"from {mantissa:#x}", lambda _, mantissa=mantissa: mantissa), MXFP4)
    for mantissa in (0x400000, 0x480000)  # E2M1's largest code is 4 * 1.5
]
PAIRS = OF_THE_LIBRARY + CUSTOM


@pytest.mark.parametrize(
    ("rule", "format"), PAIRS, ids=[f"{rule.name}, {format.name}" for rule, format in PAIRS]
)
def test_which_rules_clip(rule: ScaleRule, format: BlockFormat):
    """Of many drawn blocks some then have a value above their largest code."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((512, 32)) * 2 ** rng.uniform(-3, 3, (512, 1))
    quantized = mx_jax.quantize(x.astype(np.float32), format, scale_rule=rule)
    codes = jnp.full_like(quantized.codes, format.element.max_code)
    largest = dataclasses.replace(quantized, codes=codes).dequantize()
    # Over a float32 scale amax may come out a rounding above the largest code.
    assert clips(rule, format) == bool((np.abs(x) > np.asarray(largest) * (1 + 2**-20)).any())
