"""Goals on a GPU: what is measured for each, and what is said of what was measured."""

import dataclasses
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import mx_jax
from benchmarks import gpu, gpu_casts, gpu_steps
from benchmarks.gpu_compare import Chain, Comparison, Measured, compare
from benchmarks.gpu_goals import GOALS, Goal, cast_of, sheet, verdicts
from benchmarks.gpu_products import BASELINE, KERNEL, Pair, Timed
from benchmarks.gpu_steps import Step, compare_steps
from benchmarks.timing import Spread
from mx_jax.backends import evidence
from mx_jax.backends.calls import QuantizeCall
from mx_jax.backends.evidence import Row, source_of
from mx_jax.backends.pallas_gpu import PALLAS_GPU
from mx_jax.backends.pallas_gpu.architecture import SM90
from mx_jax.backends.reference import REFERENCE
from mx_jax.backends.target import Target
from mx_jax.formats import MXFP4, MXFP8_E4M3
from mx_jax.measure.cases import Case as Cast
from mx_jax.measure.subjects import PLAIN
from tests.backends.altered import altered
from tests.backends.mosaic import needs_mosaic

tables = pytest.mark.one_python(reason="only tables and arithmetic")
DEVICES = {"H100": "NVIDIA H100 80GB HBM3", "H200": "NVIDIA H200"}
TINY = Step(width=64, hidden=64, heads=2, kv_heads=1, sequences=1, length=32)

# Of bfloat16 products, (n, k), by number of rows; then casts and steps.
PRODUCTS = """
| of               | GPU  | 1   | 16  | 64  | 256 | 4096 |
| mxfp4 8192 8192  | H200 | 2.7 | 2.7 | 2.0 | 1.1 | 0.95 |
| mxfp4 8192 8192  | H100 | 3.0 | 3.0 | 2.3 | 1.1 | 0.95 |
| mxfp8 8192 8192  | any  | 1.7 | 1.7 | 1.6 | 1.0 | 0.95 |
| mxfp4 5120 5120  | any  | 2.3 | 2.3 | 1.8 |     |      |
| mxfp4 10240 8192 | any  | 2.3 | 2.3 | 1.8 |     |      |
| mxfp4 2880 2880  | any  | 2.3 | 2.3 | 1.8 |     |      |
"""


def goals_of(what: Any, device: str = DEVICES["H200"]) -> list[Goal]:
    return [goal for goal in GOALS if goal.what == what and goal.is_for(device)]


def asked(device: str, arguments: str = "") -> list[Any]:
    return gpu.wanted(gpu.parse(arguments.split()), device, SM90)


@tables
def test_every_cell_of_the_table_is_one_goal():
    lines = [
        [cell.strip() for cell in re.split(r"\|", line)[1:-1]] for line in PRODUCTS.split("\n")
    ]
    (_, _, *rows), *products = [line for line in lines if line]
    found = []
    for title, device, *ratios in products:
        name, n, k = title.split()
        pair = Pair(rhs=MXFP8_E4M3 if name == "mxfp8" else MXFP4)
        for m, ratio in zip(rows, ratios, strict=True):
            if ratio:
                what = Timed(pair=pair, m=int(m), n=int(n), k=int(k))
                (goal,) = goals_of(what, DEVICES.get(device, "any GPU"))
                assert (goal.ratio, goal.way) == (float(ratio), KERNEL)
                assert goal.devices == (() if device == "any" else (device,))
                assert goal.limit == (
                    3.7 if (device, m) in (("H200", "1"), ("H200", "16")) else None
                )
                found.append(goal)
    steps = [(goal.way, goal.ratio, goal.devices) for goal in goals_of(Step(recipe="mxfp8"))]
    assert steps == [(PLAIN, 0.8, ()), (KERNEL, 0.95, ("H100", "H200"))]
    casts = [(goal, goal.what) for goal in GOALS if isinstance(goal.what, Cast)]
    assert {(goal.ratio, goal.way, goal.devices) for goal, _ in casts} == {(0.9, KERNEL, ())}
    assert {(len(what.axes), what.dtype) for _, what in casts} == {(1, "bfloat16"), (2, "bfloat16")}
    assert len(found) + len(steps) + len(casts) == len(GOALS) == len(set(GOALS))


@needs_mosaic
@pytest.mark.parametrize("device", DEVICES.values())
def test_every_goal_has_a_case(device: str):
    """A comparison of its way with the baseline, unless the options leave it out."""
    options, target = gpu.parse([]), Target(platform="cuda", compute_capability=(9, 0))
    products, wanted = gpu.ProductMakers(options, target), asked(device)
    for goal in GOALS:
        if goal.is_for(device):
            assert goal.what in wanted
            found = gpu.comparison(goal.what, products, options, device)
            assert found.what == goal.what
            assert {goal.way, found.baseline} <= {name for name, _ in found.makers}


@tables
def test_options_choose():
    device = DEVICES["H100"]
    assert len(asked(device)) == len(set(asked(device)))
    named = asked(device, "--pairs mxfp4 --rows 3 --sizes 64x32")
    assert named[0] == Timed(pair=Pair(rhs=MXFP4), m=3, n=64, k=32)
    assert {type(what) for what in named[1:]} == {Step, Cast}
    assert {type(what) for what in asked(device, "--parts casts")} == {Cast}
    assert asked(device, "--parts steps") == [Step(recipe="mxfp8")]


@tables
@pytest.mark.parametrize("device", DEVICES.values())
def test_a_run_that_ends_early_has_every_kind(device: str):
    """Kinds take turns until one is through; of each, goals come in the table's order."""
    found = asked(device)
    assert [type(what) for what in found[:8]] == [
        Timed,
        Step,
        Cast,
        Timed,
        Cast,
        Timed,
        Cast,
        Timed,
    ]
    goals = [goal.what for goal in GOALS if goal.is_for(device)]
    for kind in (Timed, Step, Cast):
        own = list(dict.fromkeys(what for what in goals if isinstance(what, kind)))
        assert [what for what in found if isinstance(what, kind)][: len(own)] == own
    assert set(goals) < set(found)
    assert Timed(pair=Pair(rhs=MXFP4), m=16, n=4096, k=11008) in found


def planted(what: Any, **changes: Any) -> Measured:
    return Measured(what=what, baseline=BASELINE, **changes)


@tables
def test_verdicts():
    one, two, three, four = (
        Timed(pair=Pair(rhs=MXFP4), m=m, n=8192, k=8192) for m in (1, 16, 64, 256)
    )
    measured = [
        # The wall clock alone would say that it is missed.
        planted(one, speed={KERNEL: Spread(2.0, 2, 2, 2)}, device_speed={KERNEL: 3.0}),
        planted(two, speed={KERNEL: Spread(2.4, 2, 3, 2)}),
        planted(three, failed={KERNEL: "Traceback\nValueError: no tiles"}),
    ]
    found = {
        (own.goal.what, own.goal.devices): own
        for own in verdicts(measured, "NVIDIA H100 PCIe", [four])
    }
    met, missed, failed, left = (found[what, ("H100",)] for what in (one, two, three, four))
    assert (str(met), met.clock, met.is_met) == ("met", "device", True)
    assert (str(missed), missed.clock, missed.is_met) == ("missed by 20 %", "wall", False)
    assert missed.missed_by == pytest.approx(0.2)
    assert str(failed) == "not measured here: pallas_gpu failed: ValueError: no tiles"
    assert str(left) == "not measured here: not begun, for lack of time"
    assert str(found[one, ("H200",)]) == "not measured here: for H200, this is NVIDIA H100 PCIe"
    step = found[Step(), ()]
    assert (str(step), step.is_met) == ("not measured here: not asked for", None)
    assert len(found) == len(GOALS)
    table = sheet([met, missed, left]).markdown()
    assert "| bf16 x mxfp4, 1 x 8192 x 8192 | H100 | 3.00 | - | 3.000 | device | met |" in table
    assert "| 3.00 | - | 2.400 | wall | missed by 20 % |" in table
    texts = [json.loads(json.dumps(own.as_json()))["verdict"] for own in (met, left)]
    assert texts == ["met", str(left)]


@tables
def test_speeds_over_a_baseline_and_what_they_are_worth():
    def chain(name: str, device: float | None) -> Any:
        return name, lambda: Chain(name, lambda: None, lambda: device)

    def fails() -> Any:
        raise ValueError("no tiles")

    makers = [chain("copy", 9.0), chain(KERNEL, 7.5), chain(PLAIN, None), ("other", fails)]
    facts: dict[str, Any] = {"what": Step(), "baseline": "copy", "count": 1, "worth": 0.75}
    found = compare(Comparison(makers=makers, **facts), 0.0)
    assert found.device_speed == {KERNEL: pytest.approx(0.9)}
    assert found.best_clock(KERNEL) == (pytest.approx(0.9), "device")
    assert found.speed.keys() == {KERNEL, PLAIN}
    worth = dataclasses.replace(Comparison(makers=makers[:2], **facts), worth=1e9)
    assert compare(worth, 0.0).speed[KERNEL].smallest > 1e4
    assert found.best_clock("other") is None and "no tiles" in found.failed["other"]


@tables
def test_bytes_of_casts():
    """bfloat16 read; a byte for a code, and one for each scale."""
    of_rows, both = cast_of(MXFP8_E4M3, (-1,)), cast_of(MXFP4, (-1, -2))
    assert gpu_casts.bytes_moved(of_rows) == 8192**2 * (2 + 1 + 1 / 32)
    assert gpu_casts.bytes_moved(both) == 8192**2 * (2 + 2 + 2 / 32)
    assert gpu_casts.compare_casts(of_rows, 1).worth == (3 + 1 / 32) / 4


def test_a_cast_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch):
    cast = dataclasses.replace(cast_of(MXFP4, (-1,)), backend="planted", shape=(8, 64))

    def wrong(*operands: Any) -> Any:
        right = REFERENCE.offers[QuantizeCall].run(*operands)
        return dataclasses.replace(right, codes=right.codes.at[-1, -1].add(1))

    for run, failed in ((REFERENCE.offers[QuantizeCall].run, set()), (wrong, {KERNEL})):
        backend = altered(REFERENCE, QuantizeCall, run)
        monkeypatch.setattr(gpu_casts, "PALLAS_GPU", backend)
        found = compare(gpu_casts.compare_casts(cast, 1, copies=2), 0.0)
        assert set(found.failed) == failed
        assert found.speed.keys() == {KERNEL, PLAIN} - failed
    assert "other bits than the reference" in found.failed[KERNEL]


def lowered(step: Step, function: Any, kind: str | None = None) -> str:
    with mx_jax.testing.target("cuda", (9, 0), device_kind=kind):
        traced = jax.jit(function).trace(*jax.eval_shape(step.draw))
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def dots(text: str) -> set[tuple[str, ...]]:
    """Dtypes of the operands and results of products of matrices; attention's have a batch."""
    of = r"tensor<[\dx]*x([a-z]\w*)>"
    line = rf"dot_general (?!.*batching_dims).*: \({of}, {of}\) -> {of}"
    return set(re.findall(line, text))


def test_the_step_lowers_for_cuda():
    step = Step()
    assert dots(lowered(step, step.in_bfloat16())) == {("bf16", "bf16", "bf16")}
    plain = lowered(step, step.on_plain_path())
    assert dots(plain) == {("bf16", "bf16", "f32")}
    assert "f8E4M3" in plain and "mosaic_gpu" not in plain


@needs_mosaic
def test_the_step_with_kernels_lowers_for_cuda():
    step = Step()
    text = lowered(step, step.with_kernels(KERNEL))
    assert "custom_call @mosaic_gpu" in text


@needs_mosaic
def test_the_plain_step_stays_plain_where_kernels_were_faster():
    kind, shape = DEVICES["H200"], (64, 64)
    rows = [
        Row(
            backend=KERNEL,
            kernel="cast",
            work=Cast(
                backend=KERNEL,
                kind="cast both ways",
                formats=("mxfp8_e4m3",) * 2,
                shape=shape,
                axes=axes,
            ).work,
            shape=shape,
            device_kind=kind,
            jax=jax.__version__,
            source=source_of(PALLAS_GPU) or "",
            error=0.1,
            over_plain=2.0,
            date="2026-11-20",
        )
        for axes in ((-1, -2), (-2, -1))
    ]
    with evidence.use(rows):
        by_evidence = TINY._function(TINY._multiply)
        assert "mosaic_gpu" in lowered(TINY, by_evidence, kind)
        assert "mosaic_gpu" not in lowered(TINY, TINY.on_plain_path(), kind)


@pytest.mark.slow
def test_a_step_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch):
    """Here what it computes is right for bfloat16, but not for the recipe."""
    monkeypatch.setattr(Step, "with_kernels", lambda self, backend: self.in_bfloat16())
    monkeypatch.setattr(gpu_steps, "_CLOSE", 1e-3)
    found = compare(compare_steps(TINY, 1), 0.0)
    assert found.failed.keys() == {KERNEL} and found.speed.keys() == {PLAIN}
    assert "the step with kernels is wrong: error=0.0" in found.failed[KERNEL]


def test_what_counts_as_another_step():
    right = jnp.ones((4, 4), jnp.bfloat16), {"w": jnp.ones(4)}
    gpu_steps._check(jax.tree.map(lambda a: 1.01 * a, right), right)
    for wrong in (1.1, float("nan")):
        with pytest.raises(
            ArithmeticError, match=f"wrong: error={'nan' if wrong != wrong else 0.1}"
        ):
            gpu_steps._check((right[0], {"w": wrong * right[1]["w"]}), right)
