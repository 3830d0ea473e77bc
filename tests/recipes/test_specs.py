"""Specs as values: wrong combinations fail when built, and the message names both sides."""

import copy
import dataclasses
import pickle
import re
from typing import Any

import pytest

from mx_jax import recipes
from mx_jax.codecs.rounding import NEAREST, STOCHASTIC, Rounding
from mx_jax.formats import MXFP4, MXFP8_E4M3, NVFP4
from mx_jax.recipes import Hadamard, MatmulSpec, OperandSpec, Recipe, Residuals, operand
from mx_jax.reference.scale_rules import FLOOR, ScaleRule
from mx_jax.sharding import Gather

HIGH = MatmulSpec(lhs=None, rhs=None)
REMEDY = "; give both operands the same, or None to keep one in high precision"
MXFP4_OF_16 = dataclasses.replace(MXFP4, name="mxfp4_16", block=(1, 16))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: operand("mxfp4", prescale=0.0),
            "OperandSpec: prescale must be positive, got 0.0",
        ),
        (
            lambda: operand("mxfp4", prescale=float("inf")),
            "prescale and its reciprocal must be normal float32 numbers, 2^-126 to 2^126, got pre",
        ),
        (
            lambda: MatmulSpec(lhs=operand(MXFP8_E4M3), rhs=operand(MXFP4_OF_16)),
            "MatmulSpec: blocks of both operands must have one size along the contracting axis, "
            "got lhs=mxfp8_e4m3 with block=32 and rhs=mxfp4_16 with block=16" + REMEDY,
        ),
        (
            lambda: MatmulSpec(lhs=operand(NVFP4), rhs=operand(MXFP4_OF_16)),
            "MatmulSpec: both operands must have scales in one format, got lhs=nvfp4 with e4m3 and "
            "rhs=mxfp4_16 with e8m0" + REMEDY,
        ),
        (
            lambda: MatmulSpec(lhs=None, rhs=None, transform=Hadamard(size=16, signs=None)),
            "MatmulSpec: a transform (Hadamard 16, random signs) cancels in a product whose "
            "operands are both in high precision, got lhs=None and rhs=None; drop it, or quantize",
        ),
        (
            lambda: dataclasses.replace(recipes.mxfp4(), residuals="codes"),
            "Recipe 'mxfp4': residuals must be 'primal' or 'quantized', got residuals='codes'",
        ),
        (
            lambda: dataclasses.replace(
                recipes.mxfp8(),
                output=MatmulSpec(lhs=operand("mxfp8_e4m3", prescale=0.75), rhs=None),
                residuals=Residuals.QUANTIZED,
            ),
            "but output (mxfp8_e4m3 (floor, nearest, times 0.75) x high precision) transforms or "
            "prescales what it quantizes; use residuals='primal'",
        ),
    ],
)
def test_wrong_combinations(build: Any, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        build()


def test_a_format_stands_for_its_operand():
    spec = MatmulSpec(lhs="mxfp4", rhs=MXFP8_E4M3)  # pyright: ignore[reportArgumentType]
    assert spec == MatmulSpec(lhs=operand("mxfp4"), rhs=operand(MXFP8_E4M3))
    assert hash(spec) == hash(MatmulSpec(lhs=operand("mxfp4"), rhs=operand(MXFP8_E4M3)))
    with pytest.raises(ValueError, match=r"name='mxfp5' .did you mean 'mxfp8'.*; known: mxfp8"):
        MatmulSpec(lhs=None, rhs="mxfp5")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: MatmulSpec(lhs=4, rhs=None),  # pyright: ignore
            "MatmulSpec: lhs must be an OperandSpec, a format, its name or None, got lhs=4; e.g. "
            "operand('mxfp4')",
        ),
        (
            lambda: MatmulSpec(lhs=None, rhs=recipes.mxfp4),  # pyright: ignore
            "MatmulSpec: rhs must be an OperandSpec, a format, its name or None, got rhs=<function",
        ),
        (
            lambda: MatmulSpec(lhs=None, rhs=operand("mxfp4"), transform=16),  # pyright: ignore
            "MatmulSpec: transform must be a Hadamard or None, got transform=16; e.g. Hadamard(",
        ),
        (
            lambda: Hadamard(size=2, signs=[1, -1]),  # pyright: ignore
            "Hadamard: signs must be a tuple or None, got signs=[1, -1]; e.g. (1, -1)",
        ),
    ],
)
def test_wrong_types(build: Any, message: str):
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        build()


@pytest.mark.parametrize("product", ["output", "grad_input", "grad_weight"])
def test_one_product_makes_a_recipe_quantized_and_stochastic(product: str):
    high = recipes.high_precision()
    assert high.is_high_precision and not high.is_stochastic
    for side in ("lhs", "rhs"):
        sides = {"lhs": None, "rhs": None}
        nearest = MatmulSpec(**sides | {side: operand("mxfp4")})
        one = dataclasses.replace(high, **{product: nearest})
        assert not one.is_high_precision and not one.is_stochastic
        drawing = MatmulSpec(**sides | {side: operand("mxfp4", rounding="stochastic")})
        assert dataclasses.replace(high, **{product: drawing}).is_stochastic


def test_text():
    spec = operand("mxfp4", scale_rule="even")
    assert str(spec) == "mxfp4 (even, nearest)"
    assert str(operand("nvfp4", prescale=0.75)) == "nvfp4 (amax, nearest, times 0.75)"
    assert str(MatmulSpec(lhs=None, rhs=spec)) == "high precision x mxfp4 (even, nearest)"
    transformed = MatmulSpec(lhs=spec, rhs=None, transform=Hadamard(size=2, signs=(1, -1)))
    assert str(transformed) == (
        "mxfp4 (even, nearest) x high precision after Hadamard 2, fixed signs"
    )
    assert str(recipes.weight_only("mxfp4")) == (
        "weight_only(mxfp4): output high precision x mxfp4 (even, nearest); grad_input high "
        "precision x high precision; grad_weight high precision x high precision; keeps quantized"
    )
    assert repr(spec) == "operand('mxfp4', scale_rule='even')"
    mine = dataclasses.replace(MXFP4.with_block(64), name="mine")
    assert repr(operand(mine)).startswith("operand(BlockFormat(mine, block=(1, 64)), scale_rule=")
    assert repr(recipes.mxfp8_hybrid()) == "mxfp8_hybrid()"


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        (recipes.weight_only("mxfp4"), "weight_only('mxfp4')"),
        (
            dataclasses.replace(
                recipes.high_precision(),
                name="mine",
                grad_weight=MatmulSpec(lhs=None, rhs=operand("mxfp4")),
                reduce_dtype="float32",
                residuals="quantized",
            ),
            "Recipe(name='mine', output=MatmulSpec(lhs=None, rhs=None), "
            "grad_input=MatmulSpec(lhs=None, rhs=None), "
            "grad_weight=MatmulSpec(lhs=None, rhs=operand('mxfp4', scale_rule='floor')), "
            "residuals=Residuals.QUANTIZED, reduce_dtype='float32')",
        ),
        (recipes.mxfp4().with_(gradients={"prescale": 0.75, "rounding": STOCHASTIC}), None),
        (dataclasses.replace(recipes.mxfp8(), gather=Gather("x")), None),
        (dataclasses.replace(recipes.mxfp4(), name="mxfp8"), None),
    ],
    ids=map(str, range(5)),
)
def test_what_a_recipe_shows_is_python(recipe: Recipe, text: str | None):
    assert eval(repr(recipe), vars(recipes) | {"Gather": Gather}) == recipe
    assert text is None or repr(recipe) == text


def test_a_misspelt_argument_names_the_nearest():
    misspelt: Any = {"roundng": "stochastic"}
    message = "unexpected keyword argument 'roundng' (did you mean 'rounding'?), roundng='"
    with pytest.raises(TypeError, match=re.escape(message)):
        recipes.mxfp8().with_(**misspelt)
    with pytest.raises(ValueError, match=re.escape("no part 'roundng' (did you mean 'rounding'?)")):
        recipes.mxfp8().with_(weights=misspelt)


def test_positions_are_not_accepted():
    """Six operands in a row would be read wrongly; of modes, rules and transforms too."""
    for build in (
        lambda: OperandSpec(MXFP4, FLOOR, NEAREST),  # pyright: ignore[reportCallIssue]
        lambda: MatmulSpec(None, None),  # pyright: ignore[reportCallIssue]
        lambda: Recipe("x", HIGH, HIGH, HIGH),  # pyright: ignore[reportCallIssue]
        lambda: Hadamard(2, (1, -1)),  # pyright: ignore[reportCallIssue]
        lambda: Rounding("mine", 0, NEAREST.apply),  # pyright: ignore[reportCallIssue]
        lambda: ScaleRule("mine", ("exponent",), FLOOR.scales),  # pyright: ignore[reportCallIssue]
    ):
        with pytest.raises(TypeError, match="positional"):
            build()


@pytest.mark.parametrize("name", recipes.names())
def test_recipes_are_values(name: str):
    """Equal, with equal hashes, whenever and however they are made; and they cannot change."""
    recipe = recipes.from_name(name)
    assert len(repr(recipe)) < 30
    for other in (
        recipes.from_name(name),
        copy.deepcopy(recipe),
        dataclasses.replace(recipe),
        pickle.loads(pickle.dumps(recipe)),
        eval(repr(recipe), vars(recipes)),
    ):
        assert other == recipe and hash(other) == hash(recipe)
        assert other.dot_general == recipe.dot_general
        assert hash(other.dot_general) == hash(recipe.dot_general)
    for holder, field in (
        (recipe, "output"),
        (recipe.output, "lhs"),
        (recipe.output.rhs or recipe.grad_input.rhs or operand("mxfp4"), "format"),
        (recipe.dot_general, "recipe"),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(holder, field, None)
