"""Rules, filters and the report, without a model."""

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from mx_jax import convert, recipes
from mx_jax.convert import Report, Rule, gains
from mx_jax.convert.nnx_model import einsum_axes
from mx_jax.convert.products import shape_in_product
from mx_jax.convert.rules import Layer, as_rules, decide

from .helpers import MXFP8

MXFP4 = recipes.mxfp4()


def dense(path: str, shape: tuple[int, ...] | None = (64, 64), **facts: Any) -> Layer:
    return Layer(path=path, type=nn.Dense, kernel=shape, shape=shape, **facts)


class TestRule:
    @pytest.mark.parametrize(
        ("pattern", "path", "matches"),
        [
            ("head", "head", True),
            ("head", "decoder/head", False),
            (".*head", "decoder/head", True),
            ("head", "head_2", False),
            ("", "", True),
            (".*", "", True),
            (r"block_\d+/(query|key)", "block_11/key", True),
        ],
    )
    def test_patterns_match_whole_paths(self, pattern: str, path: str, matches: bool):
        assert (decide((Rule(pattern, MXFP8),), dense(path)).recipe is MXFP8) == matches

    def test_types(self):
        rules = (Rule(".*", MXFP4, types=[nn.Einsum, nn.Conv]), Rule(".*", MXFP8, types=nn.Module))
        assert decide(rules, dense("a")).rule == 1
        assert decide(rules, Layer(path="a", type=nn.Conv, named_only=True)).rule == 0
        named_only = decide((Rule(".*", MXFP8),), Layer(path="a", type=nn.Conv, named_only=True))
        assert named_only.reason == "rule 0: only a rule with types=Conv converts it"

    def test_filters_hand_on(self):
        def tall(path: str, shape: Any, recipe: Any) -> bool:
            return shape[0] > shape[1]

        rules = (Rule(".*", MXFP8, filter=gains), Rule(".*", MXFP4, filter=tall))
        assert decide(rules, dense("a", (64, 32))).rule == 0
        assert decide(rules, dense("a", (63, 32))).rule == 1
        assert decide(rules, dense("a", (31, 32))).reason == (
            "rule 0: k=31 is no multiple of 32 (mxfp8_e4m3); rule 1: tall says no"
        )

    def test_equal_and_hashable(self):
        assert Rule("a", recipes.mxfp8(), types=[nn.Dense]) == Rule("a", MXFP8, types=nn.Dense)
        assert len({Rule("a", MXFP8, filter=convert.AutoFilter(("b",))) for _ in range(2)}) == 1

    def test_rules_are_rules(self):
        rule = Rule(".*", None)
        assert as_rules(rule, "f") == as_rules([rule], "f") == (rule,)
        for wrong in ("mxfp8", None, recipes.mxfp8):
            with pytest.raises(TypeError, match=f"^f: rules must be.*got {re.escape(repr(wrong))}"):
                as_rules(wrong, "f")  # pyright: ignore
        with pytest.raises(TypeError, match=r"^f: rules must be Rule objects, got \('.\*', None\)"):
            as_rules([(".*", None)], "f")  # pyright: ignore

    @pytest.mark.parametrize(
        ("arguments", "options", "error", "message"),
        [
            (("*", None), {}, ValueError, r"regular expression, got pattern='\*' .* write '.\*'"),
            ((3, None), {}, ValueError, r"must be a regular expression, got pattern=3"),
            (("a{9999999999999}", None), {}, ValueError, "the repetition number is too large"),
            (("(" * 3000 + ")" * 3000, None), {}, ValueError, "maximum recursion depth"),
            (
                (".*", recipes.mxfp8),
                {},
                TypeError,
                r"Rule '.\*': recipe must be a Recipe \(call it: .*\), got recipe=<function",
            ),
            (
                (".*", "mxfp9"),
                {},
                ValueError,
                r"Rule '.\*': unknown recipe name='mxfp9' .did you mean 'mxfp8'",
            ),
            ((".*", None), {"types": "Dense"}, TypeError, r"types must be classes.*types='Dense'"),
            ((".*", None), {"filter": 3}, TypeError, r"filter must be a function .* filter=3"),
        ],
        ids="glob,no text,too many,too deep,not called,recipe's name,types,filter".split(","),
    )
    def test_errors(self, arguments: Any, options: Any, error: Any, message: str):
        with pytest.raises(error, match=message):
            Rule(*arguments, **options)


class TestAutoFilter:
    @pytest.mark.parametrize(
        ("recipe", "shape", "reason"),
        [
            # torchao: k and n multiples of 16; tensor-wise no gain up to (4096, 1024).
            (recipes.float8_tensorwise(), (4096, 1024), "too small to gain: k=4096 <= 4096, n="),
            (recipes.float8_tensorwise(), (4096, 1040), None),
            (recipes.float8_tensorwise(), (4112, 1024), None),
            (recipes.float8_tensorwise(), (8192, 2040), "n=2040 is no multiple of 16"),
            # Row-wise: no gain up to n 2048, k 1024, or (2048, 4096).
            (recipes.float8_rowwise(), (8192, 2048), "too small to gain: n=2048 <= 2048"),
            (recipes.float8_rowwise(), (1024, 8192), "too small to gain: k=1024 <= 1024"),
            (recipes.float8_rowwise(), (2048, 4096), "too small to gain: k=2048 <= 2048, n=4096"),
            (recipes.float8_rowwise(), (2064, 4096), None),
            (recipes.float8_rowwise(), (2048, 4112), None),
            # Blocks: whole ones along k, and along n for the gradient of the input.
            (MXFP8, (64, 96), None),
            (MXFP8, (48, 96), "k=48 is no multiple of 32 (mxfp8_e4m3)"),
            (MXFP8, (64, 80), "n=80 is no multiple of 32 (mxfp8_e4m3)"),
            (recipes.deepseek_v3(), (256, 192), "n=192 is no multiple of 128"),
            # The forward alone: only k has to fit.
            (recipes.weight_only("mxfp4"), (64, 7), None),
            (recipes.weight_only("mxfp4"), (63, 64), "k=63 is no multiple of 32 (mxfp4)"),
            # Blocks lie along the last contracting axis; sizes count all of them.
            (MXFP8, (3, 64, 96), None),
            (MXFP8, (64, 3, 96), "k=3 is no multiple of 32 (mxfp8_e4m3)"),
            (recipes.float8_rowwise(), (2, 1024, 8192), None),
            (recipes.high_precision(), (4096, 4096), "its recipe quantizes nothing"),
            (None, (4096, 4096), "its recipe quantizes nothing"),
            (MXFP8, None, "no kernel whose axes are known"),
        ],
    )
    def test_reasons(self, recipe: Any, shape: Any, reason: str | None):
        text = gains.why_not("a/b", shape, recipe)
        assert (text is None) == gains("a/b", shape, recipe)
        assert text is None if reason is None else text is not None and reason in text


RULES = (Rule("a/.*", MXFP8), Rule("z", None), Rule("b", None))
LAYERS = (dense("a/up", (64, 128)), dense("", None), dense("b", (3, 4, 5)))
REPORT = Report(rules=RULES, decisions=tuple(decide(RULES, layer) for layer in LAYERS))


class TestReport:
    def test_text(self):
        assert str(REPORT).splitlines() == [
            "layer  type   kernel  rule  recipe",
            "a/up   Dense  64x128  0     mxfp8",
            ".      Dense  -       -     (no rule matches)",
            "b      Dense  3x4x5   2     (kept by its rule)",
            "1 of 3 layers converted",
            "rule 1 ('z') matched nothing",
        ]

    def test_a_linen_report_takes_flags_shapes_and_methods(self):
        class Model(nn.Module):
            @nn.compact
            def encode(self, x, *, train: bool, name: str):
                assert train is True and name == "a"
                return nn.Dropout(0.5, deterministic=not train)(nn.Dense(4)(x["tokens"]))

        x = {"tokens": jax.ShapeDtypeStruct((2, 8), jnp.float32)}
        report = convert.report(
            Model(), Rule(".*", MXFP8), x, train=True, name="a", method="encode"
        )
        assert report.num_converted == 1


@pytest.mark.parametrize(
    ("subscripts", "kernel", "shape"),
    [
        ("btd,dhk->bthk", (6, 2, 3), (6, 6)),
        ("bthk,hkd->btd", (2, 3, 6), (2, 3, 6)),
        ("btkh,hkd->btd", (2, 3, 6), (3, 2, 6)),
        ("bthk,hkf->bthf", (2, 3, 5), (3, 5)),
        ("...d,df->...f", (4, 5), (4, 5)),
        ("td,...df->...tf", (7, 4, 5), (4, 35)),
        ("td,d...f->...tf", (4, 7, 5), (4, 35)),
        ("b...d,d...f->b...f", (4, 7, 5), (4, 5)),
        ("btd,d->btd", (4,), None),
        ("b t d, d f -> b t f", (4, 5), (4, 5)),
    ],
)
def test_shape_of_a_kernel_in_an_einsum(subscripts: str, kernel: tuple[int, ...], shape: Any):
    assert shape_in_product(einsum_axes(subscripts, kernel), kernel) == shape
