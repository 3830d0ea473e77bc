"""sensitivity: a planted layer is found, budgets are kept, and conversion reads the choice."""

import itertools
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mx_jax
from examples.choose_formats import Budget, Sensitivity, best_choice, sensitivity
from mx_jax import convert
from mx_jax.commands.rules import read_rules
from tests.quick import quick

FORMATS = ("mxfp4", "mxfp6_e2m3", "mxint8")
ANGLES = np.cos(np.arange(64 * 64, dtype=np.float32)).reshape(64, 64)
PARAMS = {
    "params": {
        "norm": {"scale": np.ones((64,), np.float32)},
        **{f"layer_{i}": {"kernel": ANGLES, "bias": np.zeros(64)} for i in range(3)},
        "head": {"kernel": ANGLES},
    }
}


def loss(params: Any, batch: Any) -> jax.Array:
    """How far each layer's weights are from what they were; the head counts a hundred times."""
    new = params["params"]
    weights = {"layer_0": 1.0, "layer_1": 1.0, "layer_2": 1.0, "head": 100.0}
    return sum(
        (weight * batch * jnp.mean((new[name]["kernel"] - PARAMS["params"][name]["kernel"]) ** 2))
        for name, weight in weights.items()
    ) + jnp.float32(1)


BATCHES = [np.float32(0.8), np.float32(1.2)]


def sensitivity_under(budget: Budget, **options: Any) -> Sensitivity:
    return sensitivity(loss, PARAMS, BATCHES, FORMATS, budget=budget, **options)


@pytest.mark.parametrize("budget", [Budget(bits=8), Budget(loss=1.0)])
def test_a_format_that_breaks_the_loss_is_never_chosen(budget: Budget):
    """Its loss of NaN would count as none that rises."""
    kernel = np.full((32, 32), 1.1, np.float32)
    params = {"a": {"kernel": kernel}, "b": {"kernel": kernel}}

    def broken(params: Any, batch: Any) -> jax.Array:
        a, b = (params[name]["kernel"][0, 0] for name in "ab")
        return jnp.where(a == 1, jnp.nan, (a - 1.1) ** 2 + (b - 1.1) ** 2) * batch

    result = sensitivity(broken, params, BATCHES, ["mxfp4", "mxint8"], budget=budget)
    assert result.chosen == {"a/kernel": "mxint8", "b/kernel": "mxfp4"}
    assert np.isfinite(result.increase)
    # The table begins with it.
    assert str(result).splitlines()[1].startswith("a/kernel")


def test_a_planted_layer():
    """Five bits on average: the head gets more than the others, which get four."""
    result = sensitivity_under(Budget(bits=5.25))
    others = [f"params/layer_{i}/kernel" for i in range(3)]
    assert [result.chosen[name] for name in others] == ["mxfp4"] * 3
    assert result.chosen["params/head/kernel"] == "mxint8"
    assert 8 * result.bytes / (4 * 64 * 64) <= 5.25
    assert result.loss == 1 and result.increase == pytest.approx(result.sum_of_increases, rel=1e-3)
    # The first line of the table is the layer that minds most.
    heads, first, *_ = str(result).splitlines()
    assert first.startswith("params/head/kernel")
    assert heads.split() == ["layer", "shape", *FORMATS, "chosen"]
    assert "budget: 5.25 bits a parameter" in result.summary


def test_increases_are_those_of_single_layers():
    result = sensitivity_under(Budget(bits=8))
    row = next(r for r in result.rows if r.layer == "params/head/kernel" and r.name == "mxfp4")
    kernel = PARAMS["params"]["head"]["kernel"]
    error = np.asarray(mx_jax.cast(kernel, "mxfp4", axis=0, scale_rule="even")) - kernel
    assert row.increase == pytest.approx(100 * float(np.mean(error**2)), rel=1e-3)
    # Batches count 0.8 and 1.2: a mean of 1, a standard error of 0.2.
    assert row.deviation == pytest.approx(0.2 * row.increase, rel=1e-3)
    assert row.bytes == 64 * 64 * 4.25 / 8


def test_a_budget_of_bytes_and_of_loss():
    all_rows = sensitivity_under(Budget(bytes=1e9))
    # Nothing is as good as what is there, but nothing pays for what changes no loss.
    assert set(all_rows.chosen.values()) == {None}
    tight = sensitivity_under(Budget(loss=5e-3))
    assert 0 < tight.increase <= 5e-3
    loose = sensitivity_under(Budget(loss=1.0))
    assert loose.bytes < tight.bytes and loose.increase <= 1.0


def test_increases_that_do_not_add_up():
    """Together they are more than their sum: the choice is made again until the loss fits."""

    def steep(params: Any, batch: Any) -> jax.Array:
        return (loss(params, batch) - 1) ** 2

    single = sensitivity(steep, PARAMS, [1.0], ["mxfp4"], budget=Budget(bits=32.0))
    others = [r.increase for r in single.rows if r.format and "head" not in r.layer]
    # Two of the three equal layers alone would fit, but both together make four times as much.
    allowed = 2.5 * others[0]
    result = sensitivity(steep, PARAMS, [1.0], ["mxfp4"], budget=Budget(loss=allowed))
    assert result.increase <= allowed
    assert list(result.chosen.values()).count("mxfp4") == 1


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(64, name="head")(nn.relu(nn.Dense(64, name="up")(x)))


@pytest.mark.slow
def test_conversion_reads_the_choice(tmp_path: Path):
    """By rules, and by a file: the loss of converted weights is the one that was promised."""
    model, x = Model(), jax.random.normal(jax.random.key(0), (8, 64))
    params = quick(model.init)(jax.random.key(1), x)

    def squares(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((jnp.asarray(model.apply(params, x)) - exact) ** 2)

    exact = jnp.asarray(model.apply(params, x))
    result = sensitivity(squares, params, [x], ["mxfp4", "mxfp8_e4m3"], budget=Budget(bits=6.4))
    assert len(set(result.chosen.values())) == 2
    rules = result.rules(convert.Rule)
    stored = convert.weights(params, rules, pack=False)
    for name, format in result.chosen.items():
        layer = name.split("/")[1]
        assert stored["params"][layer]["kernel"].format.name == format
    converted = convert.linen(model, rules)
    promised = result.loss + result.increase
    error = jnp.asarray(converted.apply(stored, x)) - jnp.asarray(exact)
    assert float(jnp.mean(error**2)) == pytest.approx(promised, rel=1e-5)
    result.write(tmp_path / "rules.toml")
    of_file = [format.rule for format in read_rules(tmp_path / "rules.toml")]
    assert of_file == rules


def test_scanned_layers_together_and_nnx():
    state = nnx.state(nnx.Linear(64, 32, use_bias=False, rngs=nnx.Rngs(0)))

    def squares(state: Any, batch: Any) -> jax.Array:
        return jnp.sum(state["kernel"][...] ** 2) * batch

    # One format may be named alone.
    by_nnx = sensitivity(squares, state, [1.0], "mxfp4", budget=Budget(bits=5), layers="kernel")
    assert by_nnx.chosen == {"kernel": "mxfp4"} and by_nnx.increase != 0
    stacked = {"blocks": {"up": {"kernel": np.ones((3, 64, 32), np.float32)}}}

    def total(params: Any, batch: Any) -> jax.Array:
        return params["blocks"]["up"]["kernel"].sum() * batch

    budget = Budget(bits=5)
    result = sensitivity(total, stacked, [1.0], ["mxfp4"], budget=budget, scanned="blocks/.*")
    assert result.choices[0].shape == (3, 64, 32)
    with pytest.raises(ValueError, match=r"'blocks/up/kernel' must have 2 axes.*\(3, 64, 32\)"):
        sensitivity(total, stacked, [1.0], ["mxfp4"], budget=budget)


def test_errors():
    for limits, message in (
        ({}, r"exactly one of bytes, bits and loss.* got none"),
        ({"bytes": 3, "loss": 1}, "got bytes=3, loss=1; e"),
        ({"bits": -1}, "a positive number, got bits=-1"),
    ):
        with pytest.raises(ValueError, match=message):
            Budget(**limits)
    five = Budget(bits=5)
    with pytest.raises(ValueError, match="must be finite while nothing is quantized, got loss=nan"):
        sensitivity(lambda p, x: x * jnp.nan, PARAMS, [np.float32(1)], budget=five)
    with pytest.raises(ValueError, match=r"layers='none' matches none of the parameters 'params/h"):
        sensitivity_under(five, layers="none")
    with pytest.raises(ValueError, match="needs at least one batch, got none"):
        sensitivity(loss, PARAMS, [], FORMATS, budget=five)
    with pytest.raises(ValueError, match=r"smallest formats take 8,704 bytes \(4.25 bits"):
        sensitivity_under(Budget(bits=4))


def test_the_choice_is_the_best():
    """Against every choice that there is."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        costs, sizes = rng.random((2, 5, 3)) * [[[1e-3]], [[1e6]]]
        limit = float(rng.uniform(sizes.min(1).sum(), sizes.max(1).sum()))
        every = [
            (sum(c[i] for c, i in zip(costs, choice, strict=True)), choice)
            for choice in itertools.product(range(3), repeat=5)
            if sum(s[i] for s, i in zip(sizes, choice, strict=True)) <= limit
        ]
        assert tuple(best_choice(costs.tolist(), sizes.tolist(), limit) or ()) == min(every)[1]
    assert best_choice([[1.0]], [[2.0]], 1.0) is None
    assert best_choice([[0.0, 0.0]], [[2.0, 1.0]], 5.0) == [1]
