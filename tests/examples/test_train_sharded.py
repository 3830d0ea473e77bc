"""`examples/train_sharded.py`: FSDP on virtual devices, of one process and of two."""

import re

import pytest

from tests.processes import printed

PROGRAM = "examples/train_sharded.py"


@pytest.mark.slow
def test_codes_travel_and_the_loss_falls():
    pytest.importorskip("sklearn")
    text = printed(PROGRAM, *"--processes 2 --steps 6 --recipe mxfp4".split())
    whole, share = map(float, re.findall(r"\(([\d.]+) of plain JAX's\)", text))
    assert whole == 1 and share <= 0.4
    assert re.search(r"mxfp4 .* as u8", text) and not re.search(r"float32 .* as u8", text)
    before, after = map(float, re.findall(r"step +\d+  loss ([\d.]+)", text))
    assert after < before - 0.2
