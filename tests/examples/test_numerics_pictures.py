"""examples/numerics_pictures.py: the committed pictures are the script's, and say what it finds."""

import re
from pathlib import Path
from typing import Any

import pytest

from examples import numerics_pictures

ROOT = Path(__file__).parents[2]
pictures: Any = numerics_pictures


@pytest.mark.slow
@pytest.mark.parametrize("name", pictures.PICTURES)
def test_the_committed_picture_is_the_scripts(name: str):
    text = (pictures.FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    (described,) = re.findall(r"<dc:description>(\w+)</dc:description>", text)
    own = pictures.digest(Path(pictures.__file__), numbers=pictures.numbers(name))
    assert described == own, "run examples/numerics_pictures.py"
    page, _ = pictures.PICTURES[name]
    assert f"images/numerics/{name}.svg" in (ROOT / "docs" / f"{page}.md").read_text()


def test_rules_take_the_scales_that_the_page_says():
    scales = {rule: pictures.by_rule(rule)["scale"] for rule in pictures.RULES}
    assert scales == {"floor": 1, "ceil": 2, "even": 1, "rceil": 2}


def test_fields_add_up_to_the_bits_of_a_value():
    for name, own in pictures.numbers("blocks").items():
        element = own["sign"] + own["exponent"] + own["mantissa"]
        # NVFP4's tensor scale is one for all blocks.
        assert element + own["scale"] / own["block"] == own["each"], name


def test_both_operands_contract_the_axis_that_they_share():
    for pair in pictures.numbers("training_step").values():
        (_, rows, inner, one), (_, other, columns, two) = pair
        assert inner == other == one == two and len({rows, inner, columns}) == 3


def test_lines_have_all_positive_values():
    counts = {name: len(own) for name, own in pictures.numbers("number_lines").items()}
    assert counts == {"e2m1": 7, "e2m3": 31, "e3m2": 31, "e4m3": 126, "e5m2": 123, "int8": 127}


@pytest.mark.slow
def test_e2m1_loses_half_of_a_value_before_e4m3_loses_any():
    fp4, fp8 = (pictures.error_by_amplitude(name) for name in ("mxfp4", "mxfp8_e4m3"))
    below = dict(zip((-pictures.AMPLITUDES).tolist(), zip(fp4, fp8, strict=True), strict=True))
    assert below[-4.0][0] > 0.5 and below[-6.0][0] == 1
    assert max(fp8[: len(fp8) // 2]) < 0.04
