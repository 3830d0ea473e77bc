"""An example that is one script: FSDP on virtual devices."""

import re

import pytest

from tests.processes import printed

for package in ("optax", "sklearn"):
    pytest.importorskip(package)


@pytest.mark.slow
def test_codes_travel_and_the_loss_falls():
    text = printed("examples/train_sharded.py", *"--processes 2 --steps 6 --recipe mxfp4".split())
    whole, share = map(float, re.findall(r"\(([\d.]+) of plain JAX's\)", text))
    assert whole == 1 and share <= 0.4
    assert re.search(r"mxfp4 .* as u8", text) and not re.search(r"float32 .* as u8", text)
    before, after = map(float, re.findall(r"step +\d+  loss ([\d.]+)", text))
    assert after < before - 0.2
