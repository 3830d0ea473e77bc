"""What four H200s exchange, read from modules compiled ahead of time: needs no GPU."""

import json
from typing import Any

import pytest

from tests.gpu.tools import NEEDS_COMPILER, run

# What collectives.py multiplies by.
TOKENS, FEATURES, UNITS = 256, 512, 1024
BFLOAT16 = 2 * FEATURES * UNITS
# Codes and scales beside bfloat16.
RATIOS = {"mxfp8": 0.52, "mxfp6": 0.40, "mxfp4": 0.27, "nvfp4": 0.29}

pytestmark = [*NEEDS_COMPILER, pytest.mark.slow]


def gathers(found: Any) -> dict[str, int]:
    return {dtype: nbytes for kind, dtype, _, nbytes in found if kind == "all-gather"}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Any, ...], Any]:
    lines = run("collectives.py", tmp_path_factory.mktemp("collectives"), "sm_90a").splitlines()
    return {tuple(row[:-1]): row[-1] for row in map(json.loads, lines)}


@pytest.mark.parametrize(("how", "number"), [("auto", 9), ("explicit", 7)])
def test_codes_move_where_lax_gathers(how: str, number: int, cases: dict[tuple[Any, ...], Any]):
    """And nowhere else; eight bits in two orientations, for bfloat16 in one."""
    compared = [key for key in cases if key[2] == how and key[1] != "lax" and not key[3]]
    assert len(compared) == number
    for layout, recipe, *rest in compared:
        ours, theirs = cases[layout, recipe, *rest], cases[layout, "lax", *rest]
        assert set(gathers(ours)) == ({"u8"} if gathers(theirs) else set()), layout
        ratio = 2 * RATIOS[recipe]
        assert sum(gathers(ours).values()) <= ratio * sum(gathers(theirs).values()), layout


def test_sums_travel_in_bfloat16(cases: dict[tuple[Any, ...], Any]):
    """As lax's do; in float32 still where a recipe gathers on automatic axes."""
    added = [
        (key, dtype)
        for key, found in cases.items()
        for kind, dtype, _, nbytes in found
        if "reduce" in kind and nbytes > UNITS and not (key[2] == "auto" and key[3])
    ]
    assert len(added) > 20 and {dtype for _, dtype in added} == {"bf16"}, added


def test_a_recomputed_layer_gathers_less_than_lax_in_eight_bits(cases: dict[tuple[Any, ...], Any]):
    """bfloat16 is gathered again for the backward pass; of codes three orientations move."""
    found = {key[1]: gathers(cases[key]) for key in cases if key[5]}
    one = FEATURES * UNITS * 33 // 32
    assert found == {"lax": {"bf16": 2 * BFLOAT16}, "mxfp8": {"u8": 3 * one}}


def test_gathered_codes(cases: dict[tuple[Any, ...], Any]):
    gathering = [key for key in cases if key[0].startswith("FSDP") and key[3]]
    assert len(gathering) == 12
    for key in gathering:
        found, products = gathers(cases[key]), 2 if key[4] else 1
        assert set(found) == {"u8"}, key
        assert found["u8"] <= RATIOS[key[1]] * BFLOAT16 * products, key
        if key[4]:
            dtype, size = ("f32", 2) if key[2] == "auto" else ("bf16", 1)
            assert ["reduce-scatter", dtype, 1, size * BFLOAT16 // 4] in cases[key]


def test_rows_go_to_their_experts_as_codes(cases: dict[tuple[Any, ...], Any]):
    """As many rows as there are: what is padded is room on the receiver's side, not on the wire."""
    (found,) = (cases[key] for key in cases if key[0] == "experts")
    moved = {(kind, dtype): nbytes for kind, dtype, _, nbytes in found if "all-to-all" in kind}
    room, rows = TOKENS, TOKENS // 4
    assert moved == {
        ("ragged-all-to-all", "u8"): room * FEATURES * 17 // 32,
        # y, its cotangent and dx.
        ("ragged-all-to-all", "bf16"): 2 * (rows * UNITS + room * UNITS + rows * FEATURES),
    }
