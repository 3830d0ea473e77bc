"""`Recipe.with_`: each word changes the operands that it means, and nothing else."""

import dataclasses
import re
from typing import Any

import jax
import numpy as np
import pytest

from mx_jax import matmul, recipes
from mx_jax.formats import MXFP4, MXFP4_2D
from mx_jax.recipes import Hadamard, MatmulSpec, Recipe, operand

HIGH = MatmulSpec(lhs=None, rhs=None)
RANDOM = Hadamard(size=32, signs=None)
CEIL = operand("mxfp4", scale_rule="ceil").scale_rule
SIDES = [
    (product, side)
    for product in ("output", "grad_input", "grad_weight")
    for side in ("lhs", "rhs")
]
OF = {
    "weights": [("output", "rhs"), ("grad_input", "rhs")],
    "activations": [("output", "lhs"), ("grad_weight", "rhs")],
    "gradients": [("grad_input", "lhs"), ("grad_weight", "lhs")],
}


def operands(recipe: Recipe) -> dict[tuple[str, str], Any]:
    return {(product, side): getattr(getattr(recipe, product), side) for product, side in SIDES}


def hand_built(recipe: Recipe, **changes: Any) -> Recipe:
    """Operands by `product_side`, other fields by their names."""
    for product in ("output", "grad_input", "grad_weight"):
        sides = {
            s: changes.pop(f"{product}_{s}") for s in ("lhs", "rhs") if f"{product}_{s}" in changes
        }
        changes[product] = dataclasses.replace(
            changes.get(product, getattr(recipe, product)), **sides
        )
    return dataclasses.replace(recipe, **changes)


@pytest.mark.parametrize("word", OF)
@pytest.mark.parametrize("change", ["mxint8", None, {"rounding": "stochastic"}], ids=str)
def test_a_tensor_is_the_same_in_both_of_its_products(word: str, change: Any):
    before = recipes.mxfp4()
    after = before.with_(**{word: change}, name="mxfp4")
    new = {
        "mxint8": operand("mxint8", scale_rule="floor"),
        "None": None,
        "{'rounding': 'stochastic'}": operand("mxfp4", scale_rule="rceil", rounding="stochastic"),
    }[str(change)]
    assert operands(after) == operands(before) | dict.fromkeys(OF[word], new)
    products = {name: getattr(before, name) for name in ("output", "grad_input", "grad_weight")}
    assert dataclasses.replace(after, **products) == before


@pytest.mark.parametrize("word", ["output", "grad_input", "grad_weight"])
def test_a_product_alone(word: str):
    base = recipes.mxfp4_stochastic()
    assert base.with_(**{word: None}, name="x") == hand_built(base, name="x", **{word: HIGH})
    whole = MatmulSpec(lhs=operand("mxint8"), rhs=None)
    assert base.with_(**{word: whole}, name="x") == hand_built(base, name="x", **{word: whole})


def test_named_recipes_from_each_other():
    mxfp8, mxfp4 = recipes.mxfp8(), recipes.mxfp4()
    everything = dict.fromkeys(OF, "mxfp4")
    assert mxfp8.with_(**everything, name="mxfp4") == mxfp4
    assert recipes.mxfp6().with_(**dict.fromkeys(OF, "mxfp6_e2m3"), name="mxfp6_e2m3") == (
        recipes.mxfp6_e2m3()
    )
    mixture = mxfp4.with_(
        weights="mxfp4_2d",
        gradients={"rounding": "stochastic"},
        name="mxfp4_stochastic",
    )
    grad_weight = dataclasses.replace(mixture.grad_weight, transform=RANDOM)
    assert dataclasses.replace(mixture, grad_weight=grad_weight) == recipes.mxfp4_stochastic()
    assert mxfp8.with_(**dict.fromkeys(OF), name="high_precision") == recipes.high_precision()


def test_a_format_brings_its_rule_and_keeps_rounding_and_prescale():
    """A rule that never clips where the operand rounds stochastically; else the measured one."""
    base = recipes.mxfp4_backward()
    changed = base.with_(weights="mxfp6_e2m3")
    expected = operand("mxfp6_e2m3", scale_rule="rceil", rounding="stochastic", prescale=0.75)
    assert changed.grad_input.rhs == expected and changed.grad_input.lhs == base.grad_input.lhs
    assert changed.output == HIGH and changed.grad_weight == base.grad_weight
    assert recipes.mxfp4_stochastic().with_(gradients="mxfp4") == recipes.mxfp4_stochastic()
    unbiased = recipes.nvfp4().with_(gradients={"format": "nvfp4", "rounding": "stochastic"})
    headroom = operand("nvfp4", scale_rule="amax_headroom", rounding="stochastic")
    assert unbiased.grad_input == MatmulSpec(lhs=headroom, rhs=recipes.nvfp4().output.rhs)
    plain = recipes.qat(MXFP4).with_(activations=MXFP4)
    assert plain.output.lhs == operand(MXFP4, scale_rule="even")
    change = operand(MXFP4_2D, scale_rule="ceil")
    assert recipes.mxfp4_stochastic().with_(weights=change).grad_input.rhs == change
    square = recipes.mxfp8().with_(weights="mxfp8_e4m3_2d")
    assert square.grad_input.rhs == operand("mxfp8_e4m3_2d", scale_rule="rceil")


def test_codes_of_square_blocks_are_kept_where_both_products_read_them():
    square = recipes.mxfp8().with_(weights="mxfp8_e4m3_2d")
    floor = operand("mxfp8_e4m3_2d", scale_rule="floor")
    assert square.kept_as_codes == ("rhs",)
    for change in (
        {"grad_input": dataclasses.replace(square.grad_input, rhs=floor)},
        {"grad_input": dataclasses.replace(square.grad_input, transform=RANDOM)},
        {"weights": {"prescale": 0.75}},
        {"weights": {"rounding": "stochastic"}},
        {"weights": "mxfp8_e4m3"},
    ):
        assert "rhs" not in square.with_(**change).kept_as_codes


@pytest.mark.parametrize(
    ("recipe", "gradients", "rule"),
    [
        ("mxfp4", {"rounding": "stochastic"}, "rceil"),
        ("nvfp4", {"rounding": "stochastic"}, "amax_headroom"),
        ("mxfp4", {"rounding": "away"}, "even"),
        # Named, with room, unclipped, as stochastic as before.
        ("mxfp4", {"rounding": "stochastic", "scale_rule": "even"}, "even"),
        ("mxfp4", {"rounding": "stochastic", "prescale": 0.75}, "even"),
        ("mxfp8", {"rounding": "stochastic"}, "rceil"),
        ("float8_rowwise", {"rounding": "stochastic"}, "float8_power_of_two"),
        ("nvfp4_pretraining", {"rounding": "stochastic", "prescale": 1.0}, "amax_subnormal"),
    ],
)
def test_whatever_comes_to_round_stochastically_never_clips(recipe: str, gradients: Any, rule: str):
    changed = getattr(recipes, recipe)().with_(gradients=gradients)
    assert (
        changed.grad_input.lhs == changed.grad_weight.lhs
        and changed.grad_input.lhs.scale_rule.name == rule
    )
    assert changed.grad_input.lhs.rounding.name == gradients["rounding"]


def test_a_product_in_high_precision_stays_so():
    weights = recipes.weight_only("mxfp4")
    changed = weights.with_(activations="mxfp8_e4m3", name="W4A8")
    e4m3 = operand("mxfp8_e4m3", scale_rule="rceil")
    assert changed == hand_built(weights, name="W4A8", output_lhs=e4m3)
    none = recipes.nvfp4_pretraining().with_(activations=None, gradients=None)
    assert none.grad_weight == HIGH and none.output.rhs == recipes.nvfp4_pretraining().output.rhs


def test_backward_by_one_word():
    mxfp8, qat = recipes.mxfp8(), recipes.qat("mxfp8_e4m3")
    assert mxfp8.with_(backward="dequantized", name=qat.name) == qat
    assert (
        qat.with_(backward="quantized", name="mxfp8") == mxfp8 == mxfp8.with_(backward="quantized")
    )
    assert mxfp8.with_(backward="quantized", gradients="mxfp8_e5m2").grad_input.lhs == operand(
        "mxfp8_e5m2", scale_rule="rceil"
    )
    high = mxfp8.with_(backward="high_precision")
    assert high.name == "mxfp8, backward=high_precision" and high.output == mxfp8.output
    assert recipes.mxfp4_backward().with_(backward="quantized") == recipes.mxfp4_backward()
    x, w = np.linspace(-1.0, 3.0, 2 * 64 * 8, dtype=np.float32).reshape(2, 64, 8)
    gradients = jax.grad(lambda x, w: matmul(x.T, w, recipe=high).sum(), (0, 1))(x, w)
    for gradient, exact in zip(gradients, (w.sum(1), x.sum(1)), strict=True):
        np.testing.assert_allclose(gradient, np.repeat(exact[:, None], 8, 1), rtol=1e-6)


def test_the_nearer_word_counts():
    """A product's before a tensor's before everything's."""
    changed = recipes.mxfp4().with_(
        scale_rule="floor",
        rounding="away",
        gradients={"scale_rule": "rceil"},
        grad_weight=MatmulSpec(lhs=operand("mxint8"), rhs=None),
    )
    away = operand("mxfp4", scale_rule="floor", rounding="away")
    assert changed.output == MatmulSpec(lhs=away, rhs=away)
    up = operand("mxfp4", scale_rule="rceil", rounding="away")
    assert changed.grad_input == MatmulSpec(lhs=up, rhs=away)
    assert changed.grad_weight == MatmulSpec(lhs=operand("mxint8"), rhs=None)
    measured = changed.with_(scale_rule=None)
    assert measured.output.lhs == operand("mxfp4", scale_rule="even", rounding="away")


def test_equal_however_it_was_said():
    mxfp8, ceil = recipes.mxfp8(), operand("mxfp4", scale_rule="ceil")
    assert mxfp8.with_() == mxfp8 and mxfp8.with_(name="y").name == "y"
    assert mxfp8.with_(weights="MXFP4") == mxfp8.with_(weights=MXFP4)
    one, other = {"scale_rule": "ceil", "format": "mxfp4"}, {"format": MXFP4, "scale_rule": CEIL}
    assert mxfp8.with_(weights=one) == mxfp8.with_(weights=other) == mxfp8.with_(weights=ceil)
    assert hash(mxfp8.with_(grad_weight=None, weights=ceil)) == hash(
        mxfp8.with_(weights=ceil, grad_weight=None)
    )


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ({"weights": "MXFP4"}, "mxfp8, weights=mxfp4 (even, nearest)"),
        ({"grad_weight": None}, "mxfp8, grad_weight=high precision"),
        (
            {"scale_rule": CEIL, "activations": None},
            "mxfp8, activations=high precision, scale_rule=ceil",
        ),
        ({"weights": "mxfp8_e4m3"}, "mxfp8"),
    ],
)
def test_the_name_says_what_was_changed(words: dict[str, Any], name: str):
    assert recipes.mxfp8().with_(**words).name == name


@pytest.mark.parametrize(
    ("base", "words", "message"),
    [
        (
            recipes.mxfp8(),
            {"weights": "nvfp4"},
            "with_: recipe 'mxfp8', output: MatmulSpec: blocks of both operands must have one size "
            "along the contracting axis, got lhs=mxfp8_e4m3 with block=32 and rhs=nvfp4 with block="
            "16; give both operands the same, or None to keep one in high precision; output multip",
        ),
        (
            recipes.high_precision(),
            {"weights": "mxfp4"},
            "weights changes products that quantize, but output, grad_input are in high precision "
            "or were given whole, got weights='mxfp4'; start from a recipe that quantizes them, as "
            "weight_only('mxfp4') or mxfp4(), or give the product, as output=MatmulSpec(lhs=None, ",
        ),
        (
            recipes.mxfp4(),
            {"gradients": "mxfp8_e4m3", "grad_input": None, "grad_weight": HIGH},
            "gradients changes products that quantize, but grad_input, grad_weight are in high pre",
        ),
        (
            recipes.weight_only("mxfp4"),
            {"activations": {"rounding": "stochastic"}},
            "output: activations are in high precision here, got activations={'rounding': "
            "'stochastic'}; name their format too, as activations={",
        ),
        (
            recipes.mxfp8(),
            {"backward": "quantised"},
            "backward must be one of high_precision, dequantized, quantized (did you mean 'quantiz",
        ),
        (
            recipes.high_precision(),
            {"backward": "dequantized"},
            "backward follows what the output quantizes, but output is in high precision, got",
        ),
        (recipes.mxfp8(), {"weights": "mxfp9"}, "unknown block format name='mxfp9' (did "),
        (
            recipes.mxfp4(),
            {"scale_rule": "amax"},
            "output: scale rule 'amax' fills scales of kind ",
        ),
        (
            recipes.mxfp4(),
            {"weights": {"block": 16}},
            "weights has no part 'block', got weights={'",
        ),
    ],
)
def test_errors_teach(base: Recipe, words: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        base.with_(**words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            {"grad_weight": "mxfp4"},
            "grad_weight must be a MatmulSpec or None for high precision, got grad_weight='mxfp4'; "
            "e.g. dataclasses.replace(recipe.grad_weight, lhs=None)",
        ),
        (
            {"weights": 4},
            "output: a block format is given as a BlockFormat, a name or a dtype, got",
        ),
        (
            {"residuals": "quantized"},
            "with_: recipe 'mxfp4' got an unexpected keyword argument 'residuals', "
            "residuals='quantized'; it takes: name, weights, activations, gradients, scale_rule, ",
        ),
        ({"weights": {"prescale": "x"}}, "OperandSpec: prescale must be a number, got 'x'; output"),
        ({"name": ""}, "Recipe: name must be a text, got name=''; e.g. 'mine'"),
    ],
)
def test_wrong_types(words: dict[str, Any], message: str):
    with pytest.raises(TypeError, match=re.escape(message)):
        recipes.mxfp4().with_(**words)
