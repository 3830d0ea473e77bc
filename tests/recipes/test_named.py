"""Named recipes: which format, rule and rounding each operand of each product has."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import mx_jax
from mx_jax import convert, formats, nn, recipes
from mx_jax.ops.dot_general import RecipeDotGeneral
from mx_jax.recipes import operand
from mx_jax.recipes.base import clips
from mx_jax.reference.scale_rules import (
    AMAX,
    CEIL,
    EVEN,
    FLOOR,
    RCEIL,
    SCALE_RULES,
    ScaleRule,
    power_of_two,
)
from tests.recipes.test_with import operands


def test_a_measured_rule_goes_by_the_facts_of_a_format():
    element = dataclasses.replace(formats.E2M1, name="e")
    for renamed in (
        dataclasses.replace(formats.MXFP4, name="mine"),
        dataclasses.replace(formats.MXFP4, element=element),
    ):
        assert recipes.weight_only(renamed).output.rhs == operand(renamed, scale_rule=EVEN)
    other = dataclasses.replace(formats.MXFP4, element=dataclasses.replace(element, bias=2))
    assert recipes.weight_only(other).output.rhs == operand(other, scale_rule=FLOOR)


class RocmGpu:
    """What the library reads of an AMD GPU's device, which JAX calls by the same platform."""

    platform, device_kind, id = "gpu", "AMD Instinct MI300X", 0
    client = type("Client", (), {"platform_version": "PJRT C API\nrocm 70000"})


def test_float8_elements_are_those_of_the_machine(monkeypatch: pytest.MonkeyPatch):
    ocp, fnuz = {"e4m3", "e5m2"}, {"e4m3fnuz", "e5m2fnuz"}

    def elements() -> set[str]:
        specs = operands(recipes.float8_tensorwise()).values()
        return {spec.format.element.name for spec in specs if spec is not None}

    assert elements() == ocp
    for machine, expected in ((("rocm",), fnuz), (("cuda", (9, 0)), ocp), (("cpu",), ocp)):
        with mx_jax.testing.target(*machine):
            assert elements() == expected
    monkeypatch.setattr(jax, "devices", lambda platform=None: [RocmGpu()])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "device_count", lambda platform=None: 1)
    assert elements() == fnuz


@pytest.mark.parametrize(
    ("format", "rule"),
    [
        ("mxfp8_e4m3", RCEIL),
        ("mxfp8_e5m2", RCEIL),
        ("mxfp6_e2m3", EVEN),
        ("mxfp6_e3m2", EVEN),
        ("mxfp4", EVEN),
        ("mxint8", FLOOR),
        ("nvfp4", AMAX),
    ],
)
def test_weight_only(format: str, rule: ScaleRule):
    """Only w of the output, under the rule that loses least."""
    recipe = recipes.weight_only(format)
    assert recipe.name == f"weight_only({format})"
    expected = dict.fromkeys(operands(recipe))
    expected["output", "rhs"] = operand(format, scale_rule=rule)
    assert operands(recipe) == expected
    assert recipes.weight_only(formats.block_format(format)) == recipe


def test_weight_only_takes_a_rule_and_a_dtype():
    recipe = recipes.weight_only("mxfp4", "ceil")
    assert recipe.output.rhs == operand("mxfp4", scale_rule=CEIL)
    assert recipes.weight_only(ml_dtypes.float6_e2m3fn) == recipes.weight_only("mxfp6_e2m3")
    with pytest.raises(ValueError, match="scale rule 'amax' fills scales of kind element, but"):
        recipes.weight_only("mxfp4", "amax")
    with pytest.raises(ValueError, match="'mxfp7'"):
        recipes.weight_only("mxfp7")


def test_from_name():
    known = ", ".join(recipes.names())
    message = f"unknown recipe name='mxpf8' (did you mean 'mxfp8'?); known: {known}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        recipes.from_name("mxpf8")
    message = "unknown recipe name='mxfp8_e5m2', a block format: recipes.weight_only and qat "
    with pytest.raises(ValueError, match=message):
        recipes.from_name("mxfp8_e5m2")
    for name in ("weight_only", "qat"):
        written = getattr(recipes, name)("mxfp4")
        with pytest.raises(ValueError, match=rf"a recipe of a format: write recipes.{name}\(fo"):
            recipes.from_name(name)
        assert written.output.rhs is not None


def program(operation: Callable[..., Any], *operands: Any, **options: Any) -> str:
    return str(jax.make_jaxpr(functools.partial(operation, **options))(*operands))


def test_a_name_serves_wherever_a_recipe_does():
    """The same program, and layers and rules that are equal: a name is gone once it is passed."""
    recipe, x, w = recipes.mxfp4(), jnp.ones((4, 64)), jnp.ones((64, 8))
    experts, sizes, plain = jnp.ones((2, 64, 8)), jnp.array([1, 3]), (((1,), (0,)), ((), ()))
    weights, rngs = mx_jax.quantize(w, "mxfp4", axis=0), nnx.Rngs(0)
    calls: list[Callable[[Any], Any]] = [
        lambda recipe: program(mx_jax.matmul, x, w, recipe=recipe),
        lambda recipe: program(mx_jax.dot_general, x, w, dimension_numbers=plain, recipe=recipe),
        lambda recipe: program(functools.partial(mx_jax.einsum, "mk,kn"), x, w, recipe=recipe),
        lambda recipe: program(mx_jax.ragged_dot, x, experts, group_sizes=sizes, recipe=recipe),
        lambda recipe: jax.tree.structure(mx_jax.pack_weights(weights, recipe=recipe)),
        lambda recipe: mx_jax.inspect.explain(recipe, 8, 64, 64),
        lambda recipe: hash(RecipeDotGeneral(recipe=recipe)),
        lambda recipe: convert.Rule(".*", recipe),
        lambda recipe: convert.gains.why_not("", (1000, 64), recipe),
        lambda recipe: nn.linen.Dense(8, recipe=recipe),
        lambda recipe: nn.linen.DenseGeneral(8, recipe=recipe),
        lambda recipe: nn.linen.Einsum((8,), recipe=recipe),
        lambda recipe: nnx.graphdef(nn.nnx.Linear(8, 8, recipe=recipe, rngs=rngs)),
        lambda recipe: nnx.graphdef(nn.nnx.LinearGeneral(8, 8, recipe=recipe, rngs=rngs)),
        lambda recipe: nnx.graphdef(nn.nnx.Einsum("bk,kn->bn", (8, 8), recipe=recipe, rngs=rngs)),
    ]
    for call in calls:
        assert call("MXFP4") == call(recipe)


def test_an_injected_recipe_may_stand_in_a_jitted_pytree():
    x, w = jnp.ones((4, 64)), jnp.ones((64, 8))
    traces = []

    @jax.jit
    def apply(layer):
        traces.append(layer)
        return layer["dot_general"](layer["x"], w, (((1,), (0,)), ((), ())))

    for _ in range(2):
        assert apply({"x": x, "dot_general": recipes.mxfp4().dot_general})[0, 0] == 64
    assert len(traces) == 1


def test_fast_accumulation_is_a_choice_of_each_product():
    recipe = recipes.float8_rowwise()
    products = recipe.output, recipe.grad_input, recipe.grad_weight
    assert [product.fast_accumulation for product in products] == [True, False, False]


# What is said of rules, against what they do to drawn blocks.

FORMATS = "mxfp8_e4m3 mxfp8_e5m2 mxfp6_e2m3 mxfp4 mxint8 nvfp4 float8_rowwise_e4m3".split()
# A rule that corrects its scales afterwards has left room before.
OF_THE_LIBRARY = [
    (rule, formats.block_format(name))
    for name in FORMATS
    for rule in SCALE_RULES
    if formats.block_format(name).scale.kind in rule.kinds and rule.correction is None
]
CUSTOM = [
    (power_of_two(f"from {mantissa:#x}", lambda _, mantissa=mantissa: mantissa), formats.MXFP4)
    for mantissa in (0x400000, 0x480000)  # E2M1's largest code is 4 * 1.5
]
PAIRS = OF_THE_LIBRARY + CUSTOM


@pytest.mark.parametrize(
    ("rule", "format"), PAIRS, ids=[f"{rule.name}, {format.name}" for rule, format in PAIRS]
)
def test_which_rules_clip(rule: ScaleRule, format: formats.BlockFormat):
    """Of many drawn blocks some then have a value above their largest code."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((512, 32)) * 2 ** rng.uniform(-3, 3, (512, 1))
    quantized = mx_jax.quantize(x.astype(np.float32), format, scale_rule=rule)
    codes = jnp.full_like(quantized.codes, format.element.max_code)
    largest = dataclasses.replace(quantized, codes=codes).dequantize()
    # Over a float32 scale amax may come out a rounding above the largest code.
    assert clips(rule, format) == bool((np.abs(x) > np.asarray(largest) * (1 + 2**-20)).any())
