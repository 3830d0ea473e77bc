"""Pytrees of layers under rules: one type of a third party's, told by a row, and others by name.

The layers are stand-ins for those of Equinox 0.13: frozen dataclasses that are pytrees, take one
example, store kernels `[out, in]` and are mapped by vmap. test_peers.py runs the real ones.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from mx_jax import convert, recipes
from mx_jax.convert import Rule
from mx_jax.convert.functions import deferred
from tests.quick import quick

from .helpers import TreeLinear

RECIPE = recipes.mxfp8()
ALL = Rule(".*", RECIPE)
_rng = np.random.default_rng(0)
X = jnp.asarray(_rng.standard_normal((4, 32), np.float32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Experts:
    """Somebody's own layer, known to nobody; it takes no key."""

    weight: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.einsum("enk,k->n", self.weight, x)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Model:
    layers: list[Any]
    rest: dict[str, Any]

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.rest["experts"](x)


def model() -> Model:
    def weight(*shape: int) -> jax.Array:
        return jnp.asarray(_rng.standard_normal(shape, np.float32) / 6)

    layers = [TreeLinear(weight(32, 32), weight(32)), TreeLinear(weight(64, 32), name="second")]
    return Model(
        layers, {"experts": Experts(weight(2, 8, 64)), "scale": weight(3, 3), "none": None}
    )


@pytest.mark.usefixtures("registered_linear")
def test_layers_of_the_batch():
    plain = model()
    converted = convert.tree(plain, ALL)

    def loss(model: Model) -> jax.Array:
        return jnp.sum(jax.vmap(model)(X) ** 2)

    # No gradient of a kernel for each example, `[batch, out, in]`.
    assert "f32[4,32,32]" not in str(jax.make_jaxpr(jax.grad(loss))(converted))


@pytest.mark.usefixtures("registered_linear")
def test_report_and_tree():
    """Paths are the nodes'; leaves and types stay, at their places; the way back is the model."""
    plain = model()
    report = convert.report(plain, ALL)
    assert str(report).splitlines() == [
        "layer         type        kernel  rule  recipe",
        "layers/0      TreeLinear  32x32   0     mxfp8",
        "layers/1      TreeLinear  64x32   0     mxfp8",
        "rest/experts  Experts     2x8x64  -     (rule 0: only a rule with types=Experts converts "
        "it)",
        "2 of 3 layers converted",
    ]
    assert [own.layer.shape for own in report.decisions] == [(32, 32), (32, 64), None]
    converted = convert.tree(plain, ALL)
    assert jax.tree.leaves_with_path(converted) == jax.tree.leaves_with_path(plain)
    assert isinstance(converted.layers[0], TreeLinear) and converted.layers[1].name == "second"
    assert converted.rest is plain.rest and repr(converted.layers[0]).endswith(" by mxfp8")
    stacked = jax.tree.map(lambda *own: jnp.stack(own), *[converted.layers[0]] * 3)
    assert convert.report({"a": stacked}, ALL).decisions[0].layer.kernel == (3, 32, 32)


def test_a_layer_that_a_rule_names():
    """Unknown it is traced."""
    plain = model()
    with pytest.warns(convert.UnusedRuleWarning, match="no layer is converted"):
        assert convert.tree(plain, ALL).layers[0] is plain.layers[0]
    named = Rule(".*", RECIPE, types=(TreeLinear, Experts))
    assert convert.report(plain, named, strict=True).num_converted == 3
    ours = convert.tree(plain, named).rest["experts"](X[0].repeat(2))
    theirs = plain.rest["experts"](X[0].repeat(2))
    error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
    assert 1e-3 < error < 0.1


@pytest.mark.usefixtures("registered_linear")
def test_parts_of_a_model():
    """What Equinox's partition leaves has None in the place of arrays: no layer."""
    parts = jax.tree.map(lambda _: None, model())
    with pytest.warns(convert.UnusedRuleWarning, match="no layer that a rule reaches"):
        convert.tree(parts, ALL)


@pytest.mark.parametrize("mapped", ["lhs", "rhs", "both", "twice"])
def test_a_deferred_product_is_mapped_as_dot_general_is(mapped: str):
    """Where vmap's axis is batch or kept, the axes of the product lie as XLA's would."""
    lhs = jnp.asarray(_rng.standard_normal((3, 5, 4, 32), np.float32))
    rhs = jnp.asarray(_rng.standard_normal((3, 32, 6, 5), np.float32))
    axes: Any = {"lhs": (1, None), "rhs": (None, 3), "both": (1, 3), "twice": (1, None)}[mapped]
    if axes[0] is None:
        lhs = lhs[:, 0]
    if axes[1] is None:
        rhs = rhs[..., 0]
    if mapped == "twice":
        rhs = jnp.stack([rhs, 2 * rhs])

    def run(product: Any) -> Any:
        def one(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            return product(lhs, rhs, (((2,), (1,)), ((0,), (0,))))

        fn = jax.vmap(one, axes, out_axes=2)
        if mapped == "twice":
            fn = jax.vmap(fn, (None, 0), out_axes=1)

        def loss(*own: jax.Array) -> jax.Array:
            out = fn(*own)
            # A sum alone would not tell where the axes are.
            return jnp.sum(jnp.sin(out) * jnp.cos(jnp.arange(out.size).reshape(out.shape)))

        return quick(jax.value_and_grad(loss, (0, 1)))(lhs, rhs)

    ours = run(deferred(recipes.high_precision().dot_general))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        ours,
        run(jax.lax.dot_general),
    )


@pytest.mark.usefixtures("registered_linear")
def test_below_shard_map_scan_and_remat():
    layer = convert.tree([model().layers[0]], ALL)[0]
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("rows")
    mapped = jax.shard_map(jax.vmap(layer), mesh=mesh, in_specs=spec, out_specs=spec)
    scanned = jax.checkpoint(lambda x: jax.lax.scan(lambda c, x: (c, layer(x)), 0, x)[1])
    ours = quick(mapped)(X)
    np.testing.assert_allclose(ours, quick(jax.vmap(layer))(X), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(ours, quick(scanned)(X), rtol=1e-6, atol=1e-6)
    slope = quick(jax.grad(lambda x: scanned(x).sum()))(X)
    np.testing.assert_allclose(slope, quick(jax.grad(lambda x: mapped(x).sum()))(X), rtol=0.2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Grid:
    """No layer, and its shape is no array's."""

    points: jax.Array
    shape: int = dataclasses.field(metadata={"static": True})


@pytest.mark.usefixtures("registered_linear")
def test_what_is_no_layer_may_have_any_shape():
    tree = {"model": model(), "grid": Grid(X, shape=4)}
    assert convert.tree(tree, Rule("model/.*", RECIPE), strict=False)["grid"] is tree["grid"]
