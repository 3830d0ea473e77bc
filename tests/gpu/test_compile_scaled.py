"""Ahead of time: every product that `xla_scaled` offers is one scaled dot; bytes are counted.

Needs the extra `gpu-compile`, no GPU: run with `pytest -m gpu`.
"""

import json
from pathlib import Path

import pytest

from mx_jax.backends import xla_scaled
from tests.gpu.compile_for import GPUS
from tests.gpu.tools import NEEDS_COMPILER, run, slow

pytestmark = NEEDS_COMPILER
SCALED, PLAIN = {"scaled": 1, "other": 0}, {"scaled": 0, "other": 1}


def test_every_capability_of_the_table_is_compiled_for():
    assert set(xla_scaled.CAPABILITIES) <= {gpu.capability for gpu in GPUS.values()}


@pytest.mark.parametrize(
    ("target", "forms"),
    [
        ("sm_100a", ""),
        slow("sm_100a", "forms"),
        *(
            slow(target, "")
            for target, gpu in GPUS.items()
            if gpu.capability in xla_scaled.CAPABILITIES and target != "sm_100a"
        ),
    ],
)
def test_products(target: str, forms: str, tmp_path: Path):
    """One scaled dot each; where devices share a product, or its program, a bfloat16 dot."""
    found = json.loads(run("compile_scaled.py", tmp_path, target, *forms.split()))
    wrong = {case: seen for case, seen in found["products"].items() if seen != SCALED}
    assert not wrong
    assert len(found["products"]) >= 8
    assert all(seen == PLAIN for seen in found["four devices"])
