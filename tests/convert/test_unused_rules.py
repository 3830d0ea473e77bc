"""Rules that match nothing: a flax.linen module learns of them when its layers first appear."""

import copy
import functools
import pickle
import re

import flax.linen as nn
import jax
import numpy as np
import pytest

from mx_jax import convert, recipes
from mx_jax.convert import Rule, UnusedRuleWarning

KEY, X = jax.random.key(0), np.ones((2, 32), np.float32)
MXFP8 = recipes.mxfp8()
TYPO = Rule("encoder_0", MXFP8)


class Model(nn.Module):
    """Two layers, one of them below nn.jit, and one that only `decode` has."""

    def setup(self):
        self.encoder = nn.jit(nn.Dense)(32)
        self.head = nn.Dense(4)
        self.decoder = nn.Dense(32)

    def __call__(self, x):
        return self.head(self.encoder(x))

    def decode(self, x):
        return self.decoder(x)

    def both(self, x):
        return self(self.decode(x))


VARIABLES = jax.tree.map(
    lambda leaf: np.zeros(leaf.shape, leaf.dtype),
    jax.eval_shape(functools.partial(Model().init, method=Model.both), KEY, X),
)
MESSAGE = (
    "convert.linen: rules that matched no layer: 0 ('encoder_0'); no layer is converted; the model "
    "has 'encoder', 'head'; patterns match whole paths, and the first rule that matches decides"
)


def test_the_first_call_warns():
    model = convert.linen(Model(), TYPO)
    for call in (
        lambda: model.init(KEY, X),
        lambda: model.init_with_output(KEY, X),
        lambda: model.apply(VARIABLES, X),
        lambda: model.apply(VARIABLES, X, method="__call__"),
        lambda: jax.jit(model.apply)(VARIABLES, X),
        lambda: jax.eval_shape(model.init, KEY, X),
    ):
        with pytest.warns(UnusedRuleWarning, match=f"^{re.escape(MESSAGE)}$"):
            call()


@pytest.mark.parametrize("pattern", ["encoder_0", "decoder"])
def test_strict_raises(pattern: str):
    model = convert.linen(Model(), [Rule("head", None), Rule(pattern, MXFP8)], strict=True)
    for rebuilt in (model, model.clone(), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        message = rf"matched no layer: 1 \('{pattern}'\); no layer is converted; the model has 'enc"
        for call in (lambda m: m.init(KEY, X), lambda m: jax.jit(m.apply)(VARIABLES, X)):
            with pytest.raises(ValueError, match=message):
                call(rebuilt)


@pytest.mark.slow
def test_every_call_that_meets_the_layers_is_silent():
    model = convert.linen(Model(), Rule("encoder|head", MXFP8), strict=True)
    for _ in range(2):
        model.init(KEY, X)
        model.apply(VARIABLES, X)
        jax.jit(model.apply)(VARIABLES, X)
    # Another method has other layers.
    model.apply(VARIABLES, X, method=Model.decode)
    model.apply(VARIABLES, X, method=lambda model, x: model.decode(x))


def test_a_rule_that_matched_before_is_not_told_of():
    """`init` meets what `apply` does not, and nn.jit runs a layer once for all calls."""
    model = convert.linen(Model(), [Rule("decoder", MXFP8), Rule(".*", MXFP8)], strict=True)
    model.init(KEY, X, method=Model.both)
    for _ in range(3):
        model.apply(VARIABLES, X)


def test_a_part_of_another_model():
    class Outer(nn.Module):
        part: nn.Module

        @nn.compact
        def __call__(self, x):
            return nn.Dense(32)(self.part(x))

    for strict, rule, error in ((False, TYPO, None), (True, TYPO, ValueError)):
        model = Outer(convert.linen(Model(), rule, strict=strict))
        expected = pytest.raises(error) if error else pytest.warns(UnusedRuleWarning)
        with expected:
            model.init(KEY, X)
    Outer(convert.linen(Model(), Rule("head", MXFP8), strict=True)).init(KEY, X)
    # Each conversion counts its own rules.
    inner = convert.linen(Model(), Rule("head", MXFP8), strict=True)
    outer = convert.linen(Outer(inner), Rule("Dense_0", MXFP8), strict=True)
    outer.init(KEY, X)
