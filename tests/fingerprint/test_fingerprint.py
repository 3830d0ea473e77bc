"""Programs give the bits that are recorded, by the same kernels, and exchange no more."""

import re

import pytest

from tests.fingerprint.measuring import differences, measure, recorded
from tests.fingerprint.programs import PROGRAMS

EXPECTED = recorded()
# Programs that take long to compile, and have a like among the others.
SLOW = re.compile(
    "matmul (quartet|mxfp4_b|nvfp4_)|ragged_dot (mxfp4|float8)|experts|mesh, ragged|"
    "axes: (data|FSDP on n|FSDP and|tensor|float8|mxfp6)"
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if SLOW.search(n) else []) for n in PROGRAMS]
)
def test_as_recorded(name: str):
    """`python -m tests.fingerprint` prints all differences; `--write` records them."""
    lines = differences(EXPECTED[name], measure(name))
    assert not lines, "\n".join(lines)


def test_nothing_else_is_recorded():
    assert list(EXPECTED) == list(PROGRAMS)
