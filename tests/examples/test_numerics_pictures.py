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
