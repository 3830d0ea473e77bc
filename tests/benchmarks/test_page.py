"""Pages of docs/ whose tables are those that the committed results give."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import page, page_pictures, page_tables

ROOT = Path(__file__).parents[2]


def test_the_pages_are_what_the_script_writes():
    texts = [path.read_text(encoding="utf-8") for path in page.PAGES]
    for text in texts:
        assert page.written(text) == text, "run python -m benchmarks.page"
    for name in page_tables.TABLES:
        assert "".join(texts).count(f"<!-- table: {name} -->\n\n| ") == 1
    by_hand = re.sub(r"<!-- table: .*?<!-- end -->", "", texts[0], flags=re.DOTALL)
    rules = [line for line in by_hand.splitlines() if line.startswith("|---")]
    assert len(rules) == 1, "all but the table of commands are written by the script"


def test_drawings_are_those_of_the_results():
    description = page_pictures.description()
    for name, (text, _) in page_pictures.PICTURES.items():
        drawing = (page_pictures.FOLDER / f"{name}.svg").read_text(encoding="utf-8")
        assert description in drawing, "run python -m benchmarks.page"
        path = ROOT / "docs" / f"{text}.md"
        assert f"images/results/{name}.svg" in path.read_text(encoding="utf-8")
    assert {path.stem for path in page_pictures.FOLDER.iterdir()} == set(page_pictures.PICTURES)


def test_pages_quote_the_results():
    """What README and the page of formats say of training and of one row."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    choosing = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    gaps = {}
    for row in page_tables.training()[1]:
        if row[3]:
            mean, half = map(float, row[3].split(" ± "))
            gaps[row[0]] = f"{mean:+.1f} ± {half:.1f}"
    formats = dict.fromkeys(("mxint8", "mxfp6_e2m3", "nvfp4", "mxfp4")) | {"mxfp8_e4m3": "mxfp8"}
    for name, recipe in formats.items():
        (line,) = re.findall(rf"^\| `{name}` \|.*", choosing, re.MULTILINE)
        assert gaps[recipe or name] in line
    assert gaps["mxfp8"] in readme and gaps["mxfp4"] in readme
    (row,) = (
        row
        for row in page_tables.result("cpu/goals")["rows"]
        if (row["group"], row["what"]) == ("1 row", "float32 x mxfp4, packed")
    )
    assert f"{row['ratio']['median']:.1f} times (Zen 4)" in readme


def test_other_results_write_another_page(tmp_path, monkeypatch):
    results = page_tables.result("sqnr")
    next(row for row in results["layer"] if row["recipe"] == "mxfp4")["output"] = 12.34
    (tmp_path / "sqnr.json").write_text(json.dumps(results))
    monkeypatch.setattr(page_tables, "RESULTS", tmp_path)
    text = page.written("by hand\n<!-- table: sqnr -->\nold\n<!-- end -->\nand this")
    assert "| mxfp4 | 12.3 | 16.0 |" in text and "old" not in text
    assert text.startswith("by hand\n") and text.endswith("<!-- end -->\nand this")
    with pytest.raises(KeyError, match="nothing"):
        page.written("<!-- table: nothing -->\n<!-- end -->")
