"""Recipes of mx_jax under the rules of Qwix, in linen and nnx: `python qwix_provider.py`.

Needs `pip install qwix` (0.1.8). A rule of Qwix finds products by the path of their module; an
`MxRule` gives them a recipe. Other rules go on to Qwix as before.
"""

import dataclasses

import flax.linen as nn
import jax
import qwix
from flax import nnx
from qwix._src.utils import flax_util
from shared import CLASSES, FEATURES, Report, data, run_command, show, train_linen, train_nnx

import mx_jax


# --8<-- [start:lines]
@dataclasses.dataclass(frozen=True, kw_only=True)
class MxRule(qwix.QtRule):
    """A rule of Qwix that gives products a recipe."""

    recipe: mx_jax.recipes.Recipe


class MxProvider(qwix.QtProvider):
    """Products follow the recipe of the `MxRule` that matches them, forward and backward."""

    def _multiply(self, operation, *operands, **options):
        rule, _ = self._get_current_rule_and_op_id(operation, only_rule=True)
        if not isinstance(rule, MxRule):
            return getattr(super(), operation)(*operands, **options)
        key = flax_util.make_rng("quantize") if rule.recipe.is_stochastic else None
        return getattr(mx_jax, operation)(*operands, **options, recipe=rule.recipe, key=key)

    def dot_general(self, lhs, rhs, dims, precision=None, preferred_element_type=None, **options):
        options |= {"precision": precision, "preferred_element_type": preferred_element_type}
        return self._multiply("dot_general", lhs, rhs, dims, **options)

    def einsum(self, subscripts, *operands, _dot_general=None, **options):
        return self._multiply("einsum", subscripts, *operands, **options)

    def ragged_dot(self, lhs, rhs, group_sizes, **options):
        return self._multiply("ragged_dot", lhs, rhs, group_sizes, **options)


# --8<-- [end:lines]


RULES = [
    MxRule(module_path="mlp|experts", recipe=mx_jax.recipes.mxfp4_stochastic()),
    MxRule(module_path="heads", recipe=mx_jax.recipes.mxfp8()),
]
HALF = data()[0].shape[0] // 2


class Experts(nn.Module):
    """Two experts, for the first half of the rows and for the second."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (2, FEATURES, FEATURES))
        return jax.lax.ragged_dot(x, kernel, jax.numpy.array([HALF, HALF]))


class LinenModel(nn.Module):
    """No line of it knows of quantization."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(FEATURES, name="mlp")(x))
        heads = nn.Einsum((FEATURES, 2, FEATURES // 2), "btd,dhk->bthk", name="heads")
        x = Experts(name="experts")(nn.relu(heads(x)).reshape(x.shape).mean(axis=1))
        return nn.Dense(CLASSES, name="head")(x)


class NnxExperts(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.kernel = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (2, 64, 64)))

    def __call__(self, x: jax.Array) -> jax.Array:
        with jax.named_scope("experts"):
            return jax.lax.ragged_dot(x, self.kernel[...], jax.numpy.array([HALF, HALF]))


class NnxModel(nnx.Module):
    """The same in nnx."""

    def __init__(self, rngs: nnx.Rngs):
        self.mlp = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
        self.heads = nnx.Einsum(
            "btd,dhk->bthk", (FEATURES, 2, FEATURES // 2), (2, FEATURES // 2), rngs=rngs
        )
        self.experts = NnxExperts(rngs)
        self.head = nnx.Linear(FEATURES, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        with jax.named_scope("mlp"):
            x = nnx.relu(self.mlp(x))
        with jax.named_scope("heads"):
            heads = nnx.relu(self.heads(x)).reshape(x.shape)
        return self.head(self.experts(heads.mean(axis=1)))


def in_linen(steps: int) -> tuple[list[float], Report]:
    plain = LinenModel()
    model = qwix.quantize_model(plain, MxProvider(RULES))
    return train_linen(model, steps, plain.init(jax.random.key(0), data()[0])["params"])


def in_nnx(steps: int) -> tuple[list[float], Report]:
    rngs = nnx.Rngs(0, quantize=1)
    model = qwix.quantize_model(NnxModel(rngs), MxProvider(RULES), data()[0], rngs=rngs)
    model.set_attributes(qwix_rngs=rngs)
    return train_nnx(model, steps)


def main(steps: int = 20) -> dict[str, tuple[list[float], Report]]:
    results = {}
    for name, run in (("linen", in_linen), ("nnx", in_nnx)):
        print(f"\n{name}")
        results[name] = run(steps)
        show([results[name][1]])
    return results


if __name__ == "__main__":
    run_command(main, __doc__)
