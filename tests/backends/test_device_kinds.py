"""What accelerators that are no NVIDIA GPU run, by device kind, as docs/gpu.md says: lowered."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import mx_jax

DOCS = Path(__file__).parents[2] / "docs" / "gpu.md"
KINDS = [
    ("tpu", "TPU v5p"),
    ("tpu", "TPU v6e"),
    ("tpu", "TPU v7"),
    ("rocm", "gfx942"),
    ("rocm", "gfx950"),
]
BFLOAT16, FNUZ = ("bf16", "bf16", "f32"), ("f8E4M3FNUZ", "f8E4M3FNUZ", "f32")
OCP = ("f8E4M3FN", "f8E4M3FN", "f32")
X, W = jnp.ones((8, 64), jnp.bfloat16), jnp.ones((64, 32), jnp.bfloat16)


def lowered(platform: str, kind: str, function: Any, *operands: Any) -> str:
    with mx_jax.testing.target(platform, device_kind=kind):
        traced = jax.jit(function).trace(*operands)
        return traced.lower(lowering_platforms=(platform,)).as_text()


def dots(text: str) -> set[tuple[str, ...]]:
    """Dtypes of operands and results of the products of matrices."""
    of = r"tensor<[\dx]*x([a-z]\w*)>"
    return set(re.findall(rf"dot_general .*: \({of}, {of}\) -> {of}", text))


@pytest.mark.parametrize(("platform", "kind"), KINDS, ids=str)
def test_products(platform: str, kind: str):
    """Block-scaled ones are bfloat16's; whole-axis float8 is what an AMD GPU has."""
    whole = {"gfx942": FNUZ, "gfx950": OCP}.get(kind, BFLOAT16)
    for recipe, expected in (("mxfp8", BFLOAT16), ("float8_rowwise", whole)):
        text = lowered(
            platform, kind, lambda x, w, recipe=recipe: mx_jax.matmul(x, w, recipe=recipe), X, W
        )
        assert dots(text) == {expected} and "custom_call" not in text


def test_the_page_has_every_kind():
    named = DOCS.read_text().partition("| device | what its units have besides | used |")[2]
    for _, kind in KINDS:
        assert kind.removeprefix("TPU ") in named
