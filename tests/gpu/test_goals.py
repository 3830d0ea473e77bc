"""Goals on a GPU: what is measured for each, and what is said of what was measured."""

import json
import re
from typing import Any

import jax
import pytest

import mx_jax
from benchmarks import gpu
from benchmarks.gpu_compare import PLAIN, Chain, Comparison, Measured, compare
from benchmarks.gpu_goals import GOALS, sheet, verdicts
from benchmarks.gpu_products import BASELINE, KERNEL, Pair, Timed
from benchmarks.gpu_steps import Step
from benchmarks.timing import Spread
from mx_jax.backends.target import Target
from mx_jax.formats import MXFP4
from tests.backends.mosaic import needs_mosaic
from tests.quick import lowered

DEVICES = {"H100": "NVIDIA H100 80GB HBM3", "H200": "NVIDIA H200"}


def wanted_on(device: str, arguments: str = "") -> list[Any]:
    return gpu.wanted(gpu.parse(arguments.split()), device)


@needs_mosaic
@pytest.mark.parametrize("device", DEVICES.values())
def test_every_goal_has_a_case(device: str):
    """A comparison of its way with the baseline, unless the options leave it out."""
    options, target = gpu.parse([]), Target(platform="cuda", compute_capability=(9, 0))
    products, wanted = gpu.ProductMakers(options, target), wanted_on(device)
    for goal in GOALS:
        if goal.is_for(device):
            assert goal.what in wanted
            result = gpu.comparison(goal.what, products, options, device)
            assert result.what == goal.what
            assert {goal.way, result.baseline} <= {name for name, _ in result.makers}


def test_options_choose():
    device = DEVICES["H100"]
    assert len(wanted_on(device)) == len(set(wanted_on(device)))
    named = wanted_on(device, "--pairs mxfp4 --rows 3 --sizes 64x32")
    assert named[0] == Timed(pair=Pair(rhs=MXFP4), m=3, n=64, k=32)
    assert {type(what) for what in named[1:]} == {Step}
    assert wanted_on(device, "--parts steps") == [Step(recipe="mxfp8")]


def planted(what: Any, **changes: Any) -> Measured:
    return Measured(what=what, baseline=BASELINE, **changes)


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
    result = {
        (verdict.goal.what, verdict.goal.devices): verdict
        for verdict in verdicts(measured, "NVIDIA H100 PCIe", [four])
    }
    met, missed, failed, left = (result[what, ("H100",)] for what in (one, two, three, four))
    assert (str(met), met.clock, met.is_met) == ("met", "device", True)
    assert (str(missed), missed.clock, missed.is_met) == ("missed by 20 %", "wall", False)
    assert missed.missed_by == pytest.approx(0.2)
    assert str(failed) == "not measured here: pallas_gpu failed: ValueError: no tiles"
    assert str(left) == "not measured here: not begun, for lack of time"
    assert str(result[one, ("H200",)]) == "not measured here: for H200, this is NVIDIA H100 PCIe"
    step = result[Step(), ()]
    assert (str(step), step.is_met) == ("not measured here: not asked for", None)
    assert len(result) == len(GOALS)
    table = sheet([met, missed, left]).markdown()
    assert "| bf16 x mxfp4, 1 x 8192 x 8192 | H100 | 3.00 | - | 3.000 | device | met |" in table
    assert "| 3.00 | - | 2.400 | wall | missed by 20 % |" in table
    texts = [json.loads(json.dumps(verdict.as_json()))["verdict"] for verdict in (met, left)]
    assert texts == ["met", str(left)]


def test_speeds_over_a_baseline():
    def chain(name: str, device: float | None) -> Any:
        return name, lambda: Chain(name, lambda: None, lambda: device)

    def fails() -> Any:
        raise ValueError("no tiles")

    makers = [chain("copy", 9.0), chain(KERNEL, 7.5), chain(PLAIN, None), ("other", fails)]
    facts: dict[str, Any] = {"what": Step(), "baseline": "copy", "count": 1}
    result = compare(Comparison(makers=makers, **facts), 0.0)
    assert result.device_speed == {KERNEL: pytest.approx(1.2)}
    assert result.best_clock(KERNEL) == (pytest.approx(1.2), "device")
    assert result.speed.keys() == {KERNEL, PLAIN}
    assert result.best_clock("other") is None and "no tiles" in result.failed["other"]


def dots(text: str) -> set[tuple[str, ...]]:
    """Dtypes of the operands and results of products of matrices; attention's have a batch."""
    of = r"tensor<[\dx]*x([a-z]\w*)>"
    line = rf"dot_general (?!.*batching_dims).*: \({of}, {of}\) -> {of}"
    return set(re.findall(line, text))


def test_the_step_lowers_for_cuda():
    step = Step()
    shapes = jax.eval_shape(step.draw)
    with mx_jax.testing.target("cuda", (9, 0)):
        narrow, plain = (
            lowered(run, *shapes, platform="cuda")
            for run in (step.in_bfloat16(), step.on_plain_path())
        )
    assert dots(narrow) == {("bf16", "bf16", "bf16")}
    assert dots(plain) == {("bf16", "bf16", "f32")}
    assert "f8E4M3" in plain and "mosaic_gpu" not in plain
