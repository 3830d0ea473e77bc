"""Pages of reports in a browser: drawn, light and dark, without a complaint."""

import shutil
import subprocess
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from mx_jax import checkpoint, inspect
from tests.inspect import test_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium found, e.g. `apt install chromium`"),
]


def complaints(page: Path, *options: str) -> str:
    assert BROWSER is not None
    always = "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"
    command = [BROWSER, *always, *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stderr


@pytest.mark.parametrize("kind", ["run", "checkpoint"])
def test_the_page_is_drawn_light_and_dark(kind: str, tmp_path: Path):
    page, file = tmp_path / "page.html", tmp_path / "small.safetensors"
    if kind == "run":
        sink = inspect.Memory()
        test_report.diverging_run(sink)
        inspect.report(sink, page)
    else:
        small, exact = test_report.layers()
        checkpoint.save(file, small)
        inspect.report(file, page, reference=exact)
    means = []
    # Blink's numbers for dark and light.
    for scheme in (0, 1):
        shot = tmp_path / f"{scheme}.png"
        blink = f"--blink-settings=preferredColorScheme={scheme}"
        said = complaints(page, blink, "--window-size=1000,2600", f"--screenshot={shot}")
        assert "CONSOLE" not in said
        pixels = np.asarray(matplotlib.image.imread(shot))[..., :3]
        drawn = (np.abs(pixels - pixels[0, 0]).max(-1) > 0.05).mean()
        assert 0.02 < drawn < 0.5
        means.append(pixels.mean())
    assert means[0] < 0.3 and means[1] > 0.8


def test_a_complaint_would_be_seen(tmp_path: Path):
    path = tmp_path / "flawed.html"
    path.write_text("<script>nothing.there</script>")
    assert "CONSOLE" in complaints(path, "--dump-dom")
