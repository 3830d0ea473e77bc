"""The way from a call to its equation stays short, and docs/architecture.md draws it as it is."""

import json
import re

from tests.contracts import walk
from tests.needs import needs_library
from tests.processes import printed

pytestmark = needs_library
# Frames are counted too, but each small function is one.
LIMITS = {
    "dense_forward": {"depth": 9, "way files": 4, "files": 8, "changes": 25},
    "dense_backward": {"depth": 10, "way files": 4, "files": 9, "changes": 68},
    "packed_product": {"depth": 7, "way files": 3, "files": 10, "changes": 61},
    "pallas_product": {"depth": 12, "way files": 5, "files": 22, "changes": 153},
}


def test_no_walk_exceeds_its_limits_and_the_page_draws_one():
    # A process of its own: what other tests import and patch leaves no trace there.
    text = printed("-W", "error", "-m", "tests.contracts.walk", "--draw", JAX_PLATFORMS="cpu")
    measured: dict[str, dict[str, int]] = {}
    drawings: dict[str, str] = {}
    for row in re.split(r"^(?=\{)", text, flags=re.MULTILINE)[1:]:
        counts, _, drawing = row.strip().partition("\n")
        measured |= json.loads(counts)
        drawings |= dict.fromkeys(json.loads(counts), drawing)
    assert set(measured) == set(walk.names())
    longer = [
        f"{name}: {what}={measured[name][what]}, limit {limit}"
        for name in measured
        for what, limit in LIMITS[name].items()
        if measured[name][what] > limit
    ]
    assert not longer
    (on_the_page,) = walk.DRAWING.findall(walk.PAGE.read_text())
    assert on_the_page == drawings["dense_backward"], "run python -m tests.contracts.walk --write"
