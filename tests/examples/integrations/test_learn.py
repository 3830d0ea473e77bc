"""The examples learn in quantized products, which their report names.

Those in other libraries need the versions that docs/migrate.md names.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

import mx_jax
from mx_jax import recipes
from mx_jax.testing.compare import assert_bitwise_equal
from mx_jax.testing.draw import draw_few_octaves
from tests.nn.layers import weighted_sum

ALL = ("output", "grad_input", "grad_weight")
# Nobody asks for the gradient of the data.
FIRST = ("output", "grad_weight")
X = draw_few_octaves(np.random.default_rng(0), (2, 5, 64))


@dataclasses.dataclass(frozen=True)
class Learned:
    """The quantized products of layers, other layers, and the package that it needs."""

    quantized: dict[str, tuple[str, ...]]
    plain: set[str] = dataclasses.field(default_factory=lambda: {"head"})
    package: str | None = None
    start: float = 1.0


LINEN = ("EinsumOp_0", "EinsumOp_1", "key", "out", "query", "value")
LEVANTER = ("Attention/Attention._compute_qkv/Linear", "Attention/Linear", "LlamaMlp/Linear")
EXAMPLES = {
    "linen_hooks": Learned(dict.fromkeys([*(f"attention/{name}" for name in LINEN), "mlp"], ALL)),
    "nnx_hooks": Learned(dict.fromkeys(("attention", "down", "up"), ALL)),
    "flax_bridge": Learned({"hidden": FIRST}, set()),
    "haliax_linear": Learned(
        dict.fromkeys(("block/down/Linear", "block/up/Linear"), ALL), {"head/Linear"}, "haliax"
    ),
    "levanter_trainer": Learned(
        {f"LlamaTransformer/layer/LlamaDecoderLayer/{name}": ALL for name in LEVANTER},
        {"Linear"},
        "levanter",
        start=3.0,
    ),
    "maxtext_quantization": Learned({"down": ALL, "experts": ALL, "up": FIRST}, package="maxtext"),
    "qwix_provider": Learned({"experts": ALL, "heads": ALL, "mlp": FIRST}, set(), "qwix"),
    "tunix_rules": Learned(
        dict.fromkeys(("attention", "feed_forward"), ALL), set(), "tunix", start=3.0
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_learns(name: str, integration: Any, capsys: pytest.CaptureFixture[str]):
    expected = EXAMPLES[name]
    if expected.package:
        pytest.importorskip(expected.package, exc_type=ImportError)
    result = integration(name).main()
    printed = capsys.readouterr().out
    for losses, report, *_ in result.values() if isinstance(result, dict) else [result]:
        assert losses[0] > expected.start and losses[-1] < 0.5 * losses[0], losses
        short = {
            layer.removeprefix("Model/").removeprefix("LinenModel/"): products
            for layer, products in report.quantized.items()
        }
        # Flax's nnx attention has no hook for its two products.
        plain = {layer.split("Model/")[-1] for layer in report.plain} - short.keys()
        # XLA may compute some products of other libraries' layers in several places.
        assert short.items() >= expected.quantized.items() and plain >= expected.plain
        assert expected.package or short == expected.quantized
        assert expected.package or not expected.plain or plain == expected.plain
        assert str(report) in printed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_training_loop_learns_and_is_restored(integration: Any):
    """optax and orbax around a quantized model; grain and clu too, where they are installed."""
    example = integration("training_loop")
    losses, report, kept, restored = example.main()
    assert losses[0] > 1.0 and np.mean(losses[-5:]) < 0.6 * np.mean(losses[:5]), losses
    assert report.quantized == {"Model/hidden": FIRST} and report.plain == ("Model/head",)
    # What orbax gives back to a float32 model of the same shape is what was saved.
    assert jax.tree.structure(restored) == jax.tree.structure(kept)
    jax.tree.map(assert_bitwise_equal, restored, kept)
    assert kept["step"] == 20
    assert example.mean([1.0, 2.0]) == 1.5


def test_the_report_tells_high_precision_from_quantized(integration: Any):
    """The same products without a cast are none of those that it names."""
    report = integration("shared").report

    def program(recipe: Any) -> Any:
        def loss(x, w):
            with jax.named_scope("layer"):
                return weighted_sum(mx_jax.matmul(x, w, recipe=recipe))

        gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        return report(gradient.lower(X, np.ones((64, 8), np.float32)).compile().as_text())

    assert program(recipes.high_precision()).quantized == {}
    assert program(recipes.high_precision()).plain == ("layer",)
    half = dataclasses.replace(
        recipes.mxfp8(), name="half", grad_weight=recipes.high_precision().grad_weight
    )
    assert program(half).quantized == {"layer": ("output", "grad_input")}
    assert program(recipes.mxfp8()).quantized == {"layer": ALL}
