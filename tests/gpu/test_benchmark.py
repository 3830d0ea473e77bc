"""`benchmarks.gpu` as far as a machine without a GPU goes: chains, tables, its refusal."""

import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from benchmarks import gpu
from benchmarks.gpu_compare import PLAIN, Measured
from benchmarks.gpu_goals import GOALS
from benchmarks.gpu_products import BASELINE, KERNEL, Pair, Timed, Way, products
from benchmarks.timing import Spread
from mx_jax.backends import measured
from mx_jax.backends.target import Target
from tests.backends.mosaic import needs_mosaic, with_any_jax

H200 = Target(platform="cuda", compute_capability=(9, 0))
X = jnp.ones((3, 64), jnp.bfloat16)
# The commands say so themselves on older versions, which have no kernels to measure.
pytestmark = needs_mosaic


def test_the_whole_command_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What cannot run is written down, all of it, and costs nothing else its answer."""
    with_any_jax(monkeypatch)
    out = tmp_path / "gpu.json"
    options = "--pairs mxfp4 --rows 3 --sizes 256x128 --copies 2 --calls 1 --seconds 0.02"
    options += " --parts products"
    with mx_jax.testing.target("cuda", (9, 0)):
        gpu.main([*options.split(), "--out", str(out)])
    result = json.loads(out.read_text())
    (row,) = result["rows"]
    assert (row["what"], row["of"]["n"]) == ("bf16 x mxfp4, 3 x 256 x 128", 256)
    assert [each["goal"] for each in result["goals"]] == [goal.title for goal in GOALS]
    assert {each["is_met"] for each in result["goals"]} == {None}
    assert set(row["failed"]) == {KERNEL}
    assert row["failed"][KERNEL].startswith("Traceback")
    assert set(row["microseconds"]) == {BASELINE, PLAIN}
    text = out.with_suffix(".md").read_text()
    assert f"bf16 x mxfp4, 3 x 256 x 128: {KERNEL} failed: " in text and "Traceback" not in text
    assert "| any | 2.30 | - | - | - | not measured here: not asked for |" in text


@pytest.mark.parametrize("add", [0.02, np.nan])
@pytest.mark.parametrize("lhs", [None, gpu.MXFP8_E4M3])
def test_what_is_wrong_is_not_timed(lhs: Any, add: float):
    pair = Pair(lhs=lhs, rhs=gpu.MXFP8_E4M3)
    known = products(pair, 64, 64, H200)
    right, (w,) = known[PLAIN], known[BASELINE].weights(64, 64, 1)
    (laid_out,), x = right.weights(64, 64, 1), jnp.ones((3, 64), jnp.bfloat16)
    gpu._check(KERNEL, pair, right, x, laid_out, w)
    wrong = Way(lay_out=right.lay_out, product=lambda x, w: right.product(x, w).at[-1, -1].add(add))
    with pytest.raises(ArithmeticError, match=f"{KERNEL} is wrong: error=.* of what is allowed"):
        gpu._check(KERNEL, pair, wrong, x, laid_out, w)
    with pytest.raises(ArithmeticError, match=f"{KERNEL} is wrong: error="):
        gpu._check(KERNEL, pair, known[BASELINE], x, w, w)


def test_other_bits_each_time_are_wrong():
    pair, times = Pair(rhs=gpu.MXFP4), iter(range(9))
    known = products(pair, 64, 64, H200)
    right, (w,) = known[PLAIN], known[BASELINE].weights(64, 64, 1)
    (laid_out,) = right.weights(64, 64, 1)
    near = jnp.float32(1 + 2.0**-8)

    def races(x: Any, w: Any) -> Any:
        again = jax.pure_callback(
            lambda: np.float32(next(times) > 2), jax.ShapeDtypeStruct((), "f4")
        )
        return (right.product(x, w) * jnp.where(again > 0, near, 1)).astype(jnp.bfloat16)

    with pytest.raises(ArithmeticError, match="the same product has other bits each time"):
        gpu._check(KERNEL, pair, Way(lay_out=right.lay_out, product=races), X, laid_out, w)


def test_needs_a_gpu(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="needs a GPU that a kernel runs on: it runs on platf"):
        gpu.main([])
    shown = capsys.readouterr().out
    assert shown.count("not measured here: no GPU that a kernel runs on") == len(GOALS)
    assert "training step of a 4096-wide block, mxfp8, 4096 tokens, plain path" in shown


def row(m: int, bound: float | None) -> Measured:
    return Measured(
        what=Timed(pair=Pair(rhs=gpu.MXFP4), m=m, n=8192, k=8192),
        baseline=BASELINE,
        microseconds={BASELINE: 30.0, KERNEL: 15.0},
        speed={KERNEL: Spread(2.0, 1.9, 2.1, 1.8)},
        device_microseconds={KERNEL: 14.0},
        device_speed={KERNEL: 2.1},
        bound=bound,
        failed={PLAIN: "Traceback\nValueError: why"},
    )


def test_rows_for_the_table():
    """As `measured` has them, of what is faster than XLA's product by the GPU's own clock."""
    fast = {BASELINE: 30.0, KERNEL: 15.0, PLAIN: 90.0}
    (line,) = gpu.rows(
        [
            dataclasses.replace(row(16, None), device_microseconds=fast),
            dataclasses.replace(row(64, None), device_microseconds=fast | {PLAIN: 14.0}),
            dataclasses.replace(row(16, None), device_microseconds={KERNEL: 15.0}),
        ],
        measured.H200,
    )
    names = {"Row": measured.Row, "MXFP4": gpu.MXFP4}
    (written,) = eval(f"[{line}\n]", names)
    assert written[2:6] == ("{}.{}".format(*jax.__version_info__), gpu.MXFP4, 2**26, 6.0)
    assert line.endswith("# 16 rows")
    assert written[:2] == (KERNEL, measured.H200) and datetime.date.fromisoformat(written.date)


def test_tables():
    _, times, speeds = gpu.sheets([row(1, 3.76), row(16, None)], [])
    title = "| bf16 x mxfp4, 1 x 8192 x 8192 | "
    assert f"{title}{KERNEL} | 15.0 | 14.0 |" in times.markdown()
    assert f"{title}{BASELINE} | 30.0 | - |" in times.markdown()
    assert f"1 x 8192 x 8192: {PLAIN} failed: ValueError: why" in times.markdown()
    assert f"{title}{KERNEL} | 2.00 | 2.10 | 3.76 |" in speeds.markdown()
    assert [line[-1] for line in speeds.rows] == ["3.76", "-"]
