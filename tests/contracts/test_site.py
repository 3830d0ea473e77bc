"""The site by day and by night: what docs/site.css changes can be read."""

import re
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from tests.contracts.test_docs import build
from tests.inspect.test_report_browser import BROWSER, browser

ROOT = Path(__file__).parents[2]
# What dark pages are drawn with, by the variables of the style sheet.
VARIABLE = re.compile(r"--(\w+): #([0-9a-f]{6});")

one_python = pytest.mark.one_python(reason="reads a style sheet, or shows it in a browser")


def luminance(color: str) -> float:
    """WCAG's relative luminance of six hexadecimal digits."""
    levels = np.array([int(color[at : at + 2], 16) for at in (0, 2, 4)]) / 255
    linear = np.where(levels <= 0.04045, levels / 12.92, ((levels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@one_python
@pytest.mark.parametrize("ground", ["page", "raised"])
def test_dark_text_stands_out(ground: str):
    colors = dict(VARIABLE.findall((ROOT / "docs" / "site.css").read_text()))
    assert contrast(colors["text"], colors[ground]) > 7
    # Level AA of the guidelines.
    assert contrast(colors["link"], colors[ground]) > 4.5
    assert contrast(colors["faint"], colors[ground]) > 4.5


@pytest.mark.slow
@one_python
@pytest.mark.skipif(BROWSER is None, reason="no chromium found, e.g. `apt install chromium`")
def test_pages_are_drawn_light_and_dark(tmp_path: Path):
    site = tmp_path / "site"
    assert build(site).returncode == 0
    # Tables, code and drawings.
    for page in ("numerics", "training"):
        shots = {}
        # Blink's numbers for them.
        for name, scheme in (("dark", 0), ("light", 1)):
            shot = tmp_path / f"{name}.png"
            browser(
                site / page / "index.html",
                f"--blink-settings=preferredColorScheme={scheme}",
                "--window-size=1300,3000",
                f"--screenshot={shot}",
            )
            # Below the header, which is dark by day too.
            shots[name] = np.asarray(matplotlib.image.imread(shot))[150:, 320:1240, :3]
        assert shots["light"].mean() > 0.85 and shots["dark"].mean() < 0.25
        # Nothing is left white, or a reader is dazzled.
        assert (shots["dark"].min(axis=-1) > 0.9).mean() < 0.001
