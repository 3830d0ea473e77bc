"""docs/recipes.md says of each named recipe what the recipe itself says."""

import re

from mx_jax import recipes

from .page import HEADER, PAGE, calls_of, named, table

SOURCES = "| recipe | source | differs from it |"


def test_the_table_is_the_recipes():
    page = PAGE.read_text()
    assert "\n".join(table()) in page, "stale: run python -m tests.recipes.page"


def test_every_recipe_has_a_row_and_a_source():
    page = PAGE.read_text()
    assert calls_of(HEADER, page) == list(named())
    # A row may speak of several recipes.
    sources = [call.strip("` ") for row in calls_of(SOURCES, page) for call in row.split(", ")]
    assert sorted(sources) == sorted(named())


def test_every_name_is_a_recipe_or_an_alias():
    calls = {call.partition("(")[0] for call in named()}
    aliases = {name for name in recipes.names() if recipes.from_name(name).name != name}
    assert calls == {*recipes.names(), "weight_only", "qat"} - aliases
    assert set(re.findall(r'"(\w+)"', PAGE.read_text().partition("### Sources")[0])) >= aliases
