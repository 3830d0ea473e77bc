"""Ahead of time, for every architecture: no spills, few registers, tensor-core instructions found.

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
from mx_jax.backends.pallas_gpu.architecture import TCGEN05, WGMMA
from mx_jax.backends.pallas_gpu.layouts import stored_bits
from mx_jax.formats import BLOCK_FORMATS
from tests.gpu import sass
from tests.gpu.compile_for import GPUS
from tests.gpu.tools import NEEDS_COMPILER, compiled, disassembly, registers, run, slow

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
    table = WGMMA.tiles[bits_of(name)]
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
    table = WGMMA.tiles[bits_of(name)]
    files = compiled(tmp_path, "sm_90a", "groups", name)
    assert len(files) == 2 * len(table)
    for path, (_, tiles) in zip(files, [each for each in table for _ in range(2)], strict=True):
        text = disassembly(path, "sm_90a")
        # Copies of activations, codes and scales; one of eight rows of the result, two of one.
        assert "UTMALDG" in text and text.count("UTMASTG") >= 3, path
        check_registers(path)
        assert sum(sass.issued(text, tiles)) <= limit + 0.35 * (tiles.m > 16), path


def test_sums(tmp_path: Path):
    def products(loop: list[str]) -> int:
        return sum("HGMMA" in instruction for instruction in loop)

    for path in compiled(tmp_path, "sm_90a", "sums"):
        loops = sass.loops(disassembly(path, "sm_90a"), "HGMMA")
        # 64 rows at a time in eight products of 64 x 128 x 16, each of 64 cycles; then 16.
        whole = min((loop for loop in loops if products(loop) == 8), key=len)
        assert len(whole) <= 120, "four warps issue as many in as many cycles"
        assert min(map(products, loops)) == 2


@pytest.mark.parametrize(
    ("target", "name", "limit"),
    [
        ("sm_80", "mxfp4", 3.9),
        slow("sm_80", "mxfp6_e2m3", 4.2),
        slow("sm_80", "mxfp8_e4m3", 4.4),
        slow("sm_100a", "mxfp8_e5m2", 6.8),
        slow("sm_100a", "mxfp6_e3m2", 4.5),
        *(slow(target, "mxfp4", 3.9) for target in GPUS if target not in ("sm_80", "sm_90a")),
    ],
)
def test_ampere_and_what_decodes_like_it(target: str, name: str, limit: float, tmp_path: Path):
    table = GPUS[target].architecture.decoding.tiles[bits_of(name)]
    files = compiled(tmp_path, target, "weights", name)
    assert len(files) == 2 * len(table)
    for path in files:
        text = path.read_text()
        assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in text, path
        copy = "cp.async.bulk.tensor" if target.endswith("a") else "cp.async.cg.shared.global"
        assert copy in text and re.search(r"(fma\.rn|mul)\.bf16x2", text), path
    loop = sass.main_loop(disassembly(files[0], target), "HMMA")
    assert len(loop) / (64 * table[0][1].k / 128) <= limit


@pytest.mark.parametrize(
    ("target", "lhs", "rhs", "kind"),
    [
        ("sm_100a", "mxfp8_e4m3", "mxfp8_e5m2", "mxf8f6f4.block_scale.scale_vec::1X"),
        slow("sm_100a", "mxfp4", "mxfp4", "mxf4nvf4.block_scale.scale_vec::2X"),
        ("sm_100a", "nvfp4", "nvfp4", "mxf4nvf4.block_scale.scale_vec::4X"),
        slow("sm_103a", "mxfp8_e5m2", "mxfp8_e4m3", "mxf8f6f4.block_scale.scale_vec::1X"),
        slow("sm_103a", "nvfp4", "nvfp4", "mxf4nvf4.block_scale.scale_vec::4X"),
        slow("sm_110a", "mxfp4", "mxfp4", "mxf4nvf4.block_scale.scale_vec::2X"),
    ],
)
def test_blackwell(target: str, lhs: str, rhs: str, kind: str, tmp_path: Path):
    files = compiled(tmp_path, target, "scaled", lhs, rhs)
    assert len(files) == 2 * len(TCGEN05.tiles[4 if lhs.endswith("fp4") else 8])
    for path in files:
        assert f"tcgen05.mma.cta_group::1.kind::{kind}" in path.read_text(), path
        expected = "UTCQMMA" if lhs.startswith("mxfp8") else "UTCOMMA"
        assert expected in disassembly(path, target), path


@pytest.mark.parametrize("name", ["nvfp4", slow("mxfp8_e4m3"), slow("mxfp4")])
def test_groups_on_blackwell(name: str, tmp_path: Path):
    """The dense kernel's products and copies; rows are stored eight at a time and one by one."""
    files = compiled(tmp_path, "sm_100a", "scaled_groups", name)
    eight = name.startswith("mxfp8")
    assert len(files) == len(TCGEN05.tiles[8 if eight else 4])
    for path in files:
        assert re.search(r"tcgen05\.mma\.cta_group::1\.\S*block_scale", path.read_text())
        text = disassembly(path, "sm_100a")
        assert text.count("UTMASTG") >= 3, path
        assert len(sass.main_loop(text, "UTCQMMA" if eight else "UTCOMMA")) <= 150


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
