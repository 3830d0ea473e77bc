"""docs/ builds without a warning, and what docs/site.css changes can be read."""

import contextlib
import functools
import http.server
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from tests.processes import ROOT, printed

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
# What dark pages are drawn with, by the variables of the style sheet.
VARIABLE = re.compile(r"--(\w+): #([0-9a-f]{6});")


def luminance(color: str) -> float:
    """WCAG's relative luminance of six hexadecimal digits."""
    levels = np.array([int(color[at : at + 2], 16) for at in (0, 2, 4)]) / 255
    linear = np.where(levels <= 0.04045, levels / 12.92, ((levels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("ground", ["page", "raised"])
def test_dark_text_stands_out(ground: str):
    colors = dict(VARIABLE.findall((ROOT / "docs" / "site.css").read_text()))
    assert contrast(colors["text"], colors[ground]) > 7
    # Level AA of the guidelines.
    assert contrast(colors["link"], colors[ground]) > 4.5
    assert contrast(colors["faint"], colors[ground]) > 4.5


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a folder: pages of files may not run what chooses their theme."""
    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def browser(address: str, *options: str) -> str:
    assert BROWSER is not None
    always = "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000"
    command = [BROWSER, *always, *options, address]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages, built without a warning."""
    folder = tmp_path_factory.mktemp("pages") / "site"
    printed("-m", "mkdocs", "build", "--strict", "-d", folder)
    return folder


def test_pages_are_whole(site: Path):
    references = list((site / "api").glob("*/index.html"))
    assert len(references) > 5
    for reference in references:
        # An example under a heading that the builder does not know is run into a quotation.
        html = reference.read_text()
        assert "<blockquote>" not in html and "&gt;&gt;&gt; " in html, reference
    # What the theme's button copies is what site.css does not hide meanwhile.
    scripts = (site / "assets" / "javascripts").glob("bundle.*.js")
    assert "data-md-copying" in next(scripts).read_text()
    assert "[data-md-copying] .gp" in (site / "site.css").read_text()
    for page in site.rglob("index.html"):
        prompts = page.read_text().replace('<span class="gp">&gt;&gt;&gt; </span>', "")
        assert "&gt;&gt;&gt; " not in prompts, page
        # An anchor that a heading names is no part of what one reads.
        headings = re.findall(r"<h[1-4][^>]*>(.*?)<", page.read_text())
        assert not [text for text in headings if "{" in text], page


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium found, e.g. `apt install chromium`")
# Tables, code and drawings.
@pytest.mark.parametrize("page", ["numerics", "training"])
def test_pages_are_drawn_light_and_dark(page: str, site: Path, tmp_path: Path):
    shots = {}
    with served(site) as address:
        # Blink's numbers for them.
        for name, scheme in (("dark", 0), ("light", 1)):
            shot = tmp_path / f"{name}.png"
            browser(
                f"{address}/{page}/",
                f"--blink-settings=preferredColorScheme={scheme}",
                "--window-size=1300,3000",
                f"--screenshot={shot}",
            )
            # Below the header, which is dark by day too.
            shots[name] = np.asarray(matplotlib.image.imread(shot))[150:, 320:1240, :3]
    assert shots["light"].mean() > 0.85 and shots["dark"].mean() < 0.25
    # Nothing is left white, or a reader is dazzled.
    assert (shots["dark"].min(axis=-1) > 0.9).mean() < 0.001
