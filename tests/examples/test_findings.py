"""Scripts that draw figures of docs/: what each says holds, and its figure is on the page."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from examples import numerics_pictures

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "findings"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "findings_figure")
pictures: Any = numerics_pictures

# The cheapest claim of all runs by default, the others with the slow tests.


@pytest.fixture
def finding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a script by its name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in (*NAMES, "findings_figure"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_layernorm_gains(finding: Any):
    script: ModuleType = finding("layernorm_gains")
    gains = script.gains()
    floor, even, rceil = (script.measure(gains, rule) for rule in ("floor", "even", "rceil"))
    assert floor["last_code"] == 1 and floor["error"] == pytest.approx(0.079, abs=0.001)
    assert even["last_code"] == pytest.approx(1 / 3, abs=0.05)
    assert even["error"] == pytest.approx(0.05, abs=0.001)
    assert rceil["last_code"] == 0 and rceil["error"] < 0.02


@pytest.mark.slow
def test_stochastic_clipping(finding: Any):
    script = finding("stochastic_clipping")
    slopes = {way: script.measure(way)["slope"] for way in script.WAYS}
    assert slopes["FLOOR"] == pytest.approx(0.99, abs=0.002)
    assert slopes["FLOOR, 3/4"] == pytest.approx(1, abs=0.0015)
    assert slopes["RCEIL"] == pytest.approx(1, abs=0.0015)
    # A value of 7.5 becomes 6, a fifth less; with room it is right on average.
    assert script.mean_of_largest("FLOOR", 7.5) == pytest.approx(0.8)
    assert script.mean_of_largest("FLOOR, 3/4", 7.5) == pytest.approx(1, abs=0.005)


@pytest.mark.slow
def test_adam_moments(finding: Any):
    script = finding("adam_moments")
    results = {way: script.run(way, steps=1000, rows=16) for way in script.WAYS}
    zeros = {way: results[way]["zeros"][-1] for way in results}
    assert zeros["v, nearest"] > 0.3 and zeros["v, stochastic"] > 0.3
    assert zeros["root, stochastic"] == zeros["root, odds of squares"] == 0
    means = {way: results[way]["mean"][-1] for way in results}
    assert means["root, odds of squares"] == pytest.approx(1, abs=0.01)
    assert means["root, stochastic"] > 1.015
    adam = script.optax.adamw(1e-2)
    stored = script.mx_jax.quantize_state(adam)
    exact, ours = (script.losses(tx, steps=300) for tx in (adam, stored))
    assert ours[-20:].mean() == pytest.approx(exact[-20:].mean(), rel=0.15)
    assert ours[-20:].mean() < 0.1 * exact[0]


@pytest.mark.slow
def test_nvfp4_clipping(finding: Any):
    measured = finding("nvfp4_clipping").measure()
    assert measured["clipped"] == pytest.approx(0.5, abs=0.03)
    assert measured["amax"] == pytest.approx(0.9967, abs=0.001)
    assert measured["amax_headroom"] == pytest.approx(1, abs=0.001)


@pytest.mark.slow
def test_gradients_e4m3_e5m2(finding: Any):
    script = finding("gradients_e4m3_e5m2")
    e4m3, e5m2 = script.FORMATS
    assert script.sqnr(0.0, e4m3) > script.sqnr(0.0, e5m2) + 5
    assert script.relative_error(2.0, e4m3) < 0.6 * script.relative_error(2.0, e5m2)
    assert script.relative_error(10.0, e4m3) > 2 * script.relative_error(10.0, e5m2)


@pytest.mark.slow
def test_hadamard_sizes(finding: Any):
    script = finding("hadamard_sizes")
    assert script.sqnr(32, 10.0) > script.sqnr(0, 10.0) + 1
    assert script.sqnr(32, 1.0) == pytest.approx(script.sqnr(0, 1.0), abs=0.3)


@pytest.mark.slow
def test_requantized_tiles(finding: Any):
    script = finding("requantized_tiles")
    measured = {name: script.measure(name) for name in script.FORMATS}
    lost = {name: sqnr["once"] - sqnr["twice"] for name, sqnr in measured.items()}
    assert abs(lost["mxfp8_e4m3"]) < 0.01
    assert 0.05 < lost["mxfp4"] < 0.4
    assert lost["float8_blockwise_e4m3"] == pytest.approx(3, abs=0.3)


def test_head_in_fp4(finding: Any):
    script = finding("head_in_fp4")
    assert script.vanished("mxfp4") > 0.7 and script.vanished("mxfp8_e4m3") < 0.01
    assert script.kept("mxfp4") < 0.85 < 0.99 < script.kept("mxfp8_e4m3")


def test_each_is_on_the_page_as_its_script_draws_it(finding: Any):
    figure = finding("findings_figure")
    page = (ROOT / "docs" / "accuracy.md").read_text()
    for name in NAMES:
        assert f"images/findings/{name}.svg" in page and f"{name}.py" in page
        drawing = (figure.FOLDER / f"{name}.svg").read_text(encoding="utf-8")
        assert figure.digest(FOLDER / f"{name}.py") in drawing, f"run examples/findings/{name}.py"
    assert len(NAMES) == 8


@pytest.mark.slow
@pytest.mark.parametrize("name", pictures.PICTURES)
def test_the_committed_picture_is_the_scripts(name: str):
    text = (pictures.FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    (described,) = re.findall(r"<dc:description>(\w+)</dc:description>", text)
    digest = pictures.digest(Path(pictures.__file__), numbers=pictures.numbers(name))
    assert described == digest, "run examples/numerics_pictures.py"
    page, _ = pictures.PICTURES[name]
    assert f"images/numerics/{name}.svg" in (ROOT / "docs" / f"{page}.md").read_text()


def test_rules_take_the_scales_that_the_page_says():
    scales = {rule: pictures.by_rule(rule)["scale"] for rule in pictures.RULES}
    assert scales == {"floor": 1, "ceil": 2, "even": 1, "rceil": 2}
