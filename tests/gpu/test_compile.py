"""Ahead of time, the kernel for Hopper: no spills, few registers, tensor-core instructions found.

Of XLA: every product that `xla_scaled` offers is one scaled dot, what four H200s exchange, and the
bytes of whole products are what is committed.

Needs the extra `gpu-compile`, no GPU: run with `pytest -m gpu`.
"""

import json
import re
from pathlib import Path

import jax
import pytest

from benchmarks.collectives import FEATURES, TOKENS, UNITS
from mx_jax.backends import xla_scaled
from mx_jax.backends.pallas_gpu.layouts import stored_bits
from mx_jax.backends.pallas_gpu.tiles import TILES
from mx_jax.formats import BLOCK_FORMATS
from tests.gpu import sass
from tests.gpu.compile_for import GPUS
from tests.gpu.tools import NEEDS_COMPILER, compiled, disassembly, registers, run
from tests.needs import slow

pytestmark = NEEDS_COMPILER
RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu" / "plain_path.json"


def bits_of(name: str) -> int:
    """Bits that a format's codes take in packed weights."""
    (format,) = (format for format in BLOCK_FORMATS if format.name == name)
    return stored_bits(format.element)


# Most instructions that are issued for a code, copies too; a little above what was found.
@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("mxfp4", 3.55),
        slow("nvfp4", 3.75),
        slow("mxfp8_e4m3", 4.15),
        slow("mxfp8_e5m2", 6.65),
        slow("mxfp6_e2m3", 4.4),
        slow("mxfp6_e3m2", 4.65),
        slow("mxint8", 4.6),
    ],
)
def test_hopper(name: str, limit: float, tmp_path: Path):
    table = TILES[bits_of(name)]
    files = compiled(tmp_path, "sm_90a", "weights", name)
    assert len(files) == 2 * len(table)
    for path in files:
        assert re.search(r"wgmma\.mma_async\S*k16\.f32\.bf16\.bf16", path.read_text()), path
        check_registers(path)
        assert "HGMMA.64x" in disassembly(path, "sm_90a"), path
    # Of the tile of four warpgroups, the loops of whose copies `issued` finds.
    place, tiles = next((i, each) for i, (_, each) in enumerate(table) if each.n == 256)
    assert sum(sass.issued(disassembly(files[2 * place], "sm_90a"), tiles)) <= limit


def check_registers(ptx: Path) -> None:
    """Threads start with no fewer than they ask for: more would be waited for for ever."""
    (threads,) = re.findall(r"\.maxntid (\d+)", ptx.read_text())
    (copying,) = set(re.findall(r"setmaxnreg\.dec\S* (\d+);", ptx.read_text()))
    (multiplying,) = set(re.findall(r"setmaxnreg\.inc\S* (\d+);", ptx.read_text()))
    warpgroups = int(threads) // 128
    registers_wanted = int(copying) + (warpgroups - 1) * int(multiplying)
    assert registers_wanted <= warpgroups * registers(ptx), ptx


# As without groups. The entries for many rows keep less in flight between their steps.
@pytest.mark.parametrize(
    ("name", "limit"), [("mxfp4", 3.55), slow("nvfp4", 3.75), slow("mxfp8_e4m3", 4.15)]
)
def test_groups_on_hopper(name: str, limit: float, tmp_path: Path):
    table = TILES[bits_of(name)]
    files = compiled(tmp_path, "sm_90a", "groups", name)
    assert len(files) == 2 * len(table)
    for path, (_, tiles) in zip(files, [each for each in table for _ in range(2)], strict=True):
        text = disassembly(path, "sm_90a")
        # Copies of activations, codes and scales; one of eight rows of the result, two of one.
        assert "UTMALDG" in text and text.count("UTMASTG") >= 3, path
        check_registers(path)
        assert sum(sass.issued(text, tiles)) <= limit + 0.35 * (tiles.m > 16), path


# What XLA compiles -------------------------------------------------------------------------------


def test_every_capability_of_the_table_is_compiled_for():
    assert set(xla_scaled.CAPABILITIES) <= {gpu.capability for gpu in GPUS.values()}


@pytest.mark.parametrize(
    "target",
    [
        "sm_100a",
        *(
            slow(target)
            for target, gpu in GPUS.items()
            if gpu.capability in xla_scaled.CAPABILITIES and target != "sm_100a"
        ),
    ],
)
def test_products(target: str, tmp_path: Path):
    """One scaled dot each."""
    products = json.loads(run("compile_scaled.py", tmp_path, target))
    assert len(products) >= 8
    one = {"scaled": 1, "other": 0}
    assert not {case: seen for case, seen in products.items() if seen != one}


def test_the_step_of_the_docs(tmp_path: Path):
    """Weights are gathered as codes and scales, their gradient is scattered in bfloat16."""
    peak, flops, moved = json.loads(run("compile_devices.py", tmp_path, "mxfp8"))
    assert peak > 0 and flops is None
    arrays = {key: number for key, number in moved.items() if "all-reduce" not in key}
    assert arrays == {
        "all-gather u8[512,1024]": 1,
        "all-gather u8[16,1024]": 1,
        "reduce-scatter bf16[128,1024]": 1,
    }


@pytest.mark.slow
def test_rows_go_to_their_experts_as_codes(tmp_path: Path):
    """As many rows as there are: what is padded is room on the receiver's side, not on the wire."""
    exchanges = json.loads(run("compile_devices.py", tmp_path, "experts"))
    moved = {(kind, dtype): nbytes for kind, dtype, _, nbytes in exchanges if "all-to-all" in kind}
    rows = TOKENS // 4
    assert moved == {
        ("ragged-all-to-all", "u8"): rows * FEATURES * 17 // 32,
        # y, its cotangent and dx.
        ("ragged-all-to-all", "bf16"): 2 * rows * (2 * UNITS + FEATURES),
    }


def recorded() -> list[dict]:
    return json.loads(RECORDED.read_text())["cases"]


def test_recorded_ratios():
    """Of a step, and of one whose passes are apart."""
    for what, limit in (("training step", 1.75), ("training step, passes apart", 2.15)):
        steps = [line for line in recorded() if line["what"] == what]
        assert len(steps) == 8 and all(line["ratio"] <= limit for line in steps)


def test_whole_axes():
    """Of float8_rowwise: each tensor is read twice, for one cast as for both of them."""
    moved = {(line["what"], line["by"]): line["MiB"] for line in recorded()}
    assert moved["whole axes", "float8_rowwise"] <= 650
    assert moved["whole axes, with gradients", "float8_rowwise"] <= 1450


@pytest.mark.slow
def test_traffic(tmp_path: Path):
    """The same on the version of JAX that it was recorded with; on others, as much at most."""
    lines = list(map(json.loads, run("plain_traffic.py", tmp_path, "sm_100a").splitlines()))
    same = json.loads(RECORDED.read_text())["jax"] == jax.__version__
    for line, before in zip(lines, recorded(), strict=True):
        assert {key: line[key] for key in ("what", "by")} == {k: before[k] for k in ("what", "by")}
        assert line["MiB"] == before["MiB"] if same else line["MiB"] <= 1.05 * before["MiB"]
