"""Pages of reports in a browser: drawn, light and dark, without a complaint."""

import shutil
import subprocess
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from mx_jax import checkpoint, inspect
from tests.inspect import test_report, test_report_checkpoint

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium found, e.g. `apt install chromium`"),
]


def browser(page: Path, *options: str) -> tuple[str, str]:
    assert BROWSER is not None
    always = "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"
    result = subprocess.run(
        [BROWSER, *always, *options, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return result.stdout, result.stderr


@pytest.fixture(scope="module", params=["run", "checkpoint"])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / f"{request.param}.html"
    if request.param == "run":
        sink = inspect.Memory()
        test_report.diverging_run(sink)
        inspect.report(sink, path)
    else:
        small, exact = test_report_checkpoint.layers()
        checkpoint.save(path.with_suffix(".safetensors"), small)
        inspect.report(path.with_suffix(".safetensors"), path, reference=exact)
    return path


def test_the_page_is_drawn_light_and_dark(page: Path, tmp_path: Path):
    shots = {}
    # Blink's numbers for them.
    for name, scheme in (("dark", 0), ("light", 1)):
        shot = tmp_path / f"{name}.png"
        _, said = browser(
            page,
            f"--blink-settings=preferredColorScheme={scheme}",
            "--window-size=1000,2600",
            f"--screenshot={shot}",
        )
        assert "CONSOLE" not in said
        shots[name] = np.asarray(matplotlib.image.imread(shot))[..., :3]
    for shot in shots.values():
        background = shot[0, 0]
        drawn = (np.abs(shot - background).max(-1) > 0.05).mean()
        assert 0.02 < drawn < 0.5
    assert shots["light"].mean() > 0.8 and shots["dark"].mean() < 0.3


def test_every_section_is_there(page: Path):
    text, said = browser(page, "--dump-dom")
    assert "CONSOLE" not in said
    module = test_report if page.stem == "run" else test_report_checkpoint
    places = [text.index(f"<h2>{name}</h2>") for name in module.SECTIONS]
    assert places == sorted(places)


def test_a_complaint_would_be_seen(tmp_path: Path):
    path = tmp_path / "flawed.html"
    path.write_text("<script>nothing.there</script>")
    assert "CONSOLE" in browser(path, "--dump-dom")[1]
