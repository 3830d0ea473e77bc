"""Rules that keep what they match: known to have matched, and nothing is computed otherwise."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mx_jax import convert
from mx_jax.convert.rules import UnusedRuleWarning

X = jnp.ones((4, 64))


class Cell(nn.Module):
    @nn.compact
    def __call__(self, x):
        cell = nn.SimpleCell(32)
        return cell(cell.initialize_carry(jax.random.key(0), x.shape), x)[1]


class Matmul(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x @ self.param("kernel", nn.initializers.normal(), (64, 8))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("model", [Cell(), Matmul()], ids=["cell", "matmul"])
def test_linen(model: nn.Module):
    """By an `apply` that follows no `init`, as after training."""
    variables = model.init(jax.random.key(1), X)
    kept = convert.linen(model, [convert.Rule(".*", "high_precision")], strict=True)
    np.testing.assert_array_equal(kept.apply(variables, X), model.apply(variables, X))
    missing = convert.linen(model, [convert.Rule("nothing", None)], strict=True)
    with pytest.raises(ValueError, match=r"rules that matched no layer: 0 \('nothing'\)"):
        missing.apply(variables, X)


def test_the_cause_is_said():
    """Of products that a rule matches and nothing converts; of others patterns are the cause."""

    def step(x, w):
        return jax.grad(lambda w: jnp.sum(x @ w))(w)

    for pattern, cause in (
        (
            ".*",
            "what cannot be converted: 'dot_general_0', 'dot_general_1': of a gradient taken in",
        ),
        ("dot_general_1", "they match what cannot be converted: 'dot_general_1': of a gradient"),
        ("head", "'dot_general_1'; patterns match whole paths"),
    ):
        with pytest.warns(UnusedRuleWarning, match=cause):
            convert.function(step, [convert.Rule(pattern, "mxfp8")])(X, jnp.ones((64, 8)))
