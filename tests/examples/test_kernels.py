"""A resumed run says so if measurements now choose other kernels than before."""

import dataclasses
import signal
from pathlib import Path

import numpy as np
import pytest

from mx_jax import inspect
from mx_jax.backends.evidence import Row, Work, as_json, read
from mx_jax.formats import MXFP4

for package in ("matplotlib", "optax", "orbax.checkpoint", "rich", "tqdm"):
    pytest.importorskip(package)

F32 = np.dtype("float32")
ROW = Row(
    backend="pallas_gpu",
    kernel="wgmma",
    work=Work(kind="product", formats=(MXFP4, MXFP4), dtypes=(None, None, F32)),
    shape=(64, 64, 64),
    device_kind="NVIDIA H200",
    jax="0.12.0",
    source="0123456789abcdef",
    error=0.25,
    over_plain=2.0,
    over_bfloat16=2.0,
    driver="580.95.05",
    date="2026-11-20",
)
NEWER = dataclasses.replace(ROW, over_plain=2.1, date="2026-11-21")
OTHER = dataclasses.replace(ROW, source="another")


@pytest.fixture
def settle(example, tmp_path, capsys):
    """What a run of 7 steps says that had some rows and goes on with others."""

    def said(then: list[Row] | None, now: list[Row], step: int = 7) -> str:
        run = example("lm.storage").Run(recipe="mxfp4", seed=0, train_loss=[1.0] * step)
        run.evidence = None if then is None else [as_json(row) for row in then]
        example("lm.kernels").settle_evidence(run, now, tmp_path / "former.json")
        assert run.evidence == [as_json(row) for row in now]
        return capsys.readouterr().err

    return said


def test_other_kernels_are_told(settle, tmp_path: Path):
    shown = "pallas_gpu wgmma for mxfp4 x mxfp4"
    head = (
        "mxfp4, seed 0: goes on with other kernels than those before step 7, which round "
        "otherwise: then "
    )
    tail = "; to continue with the former, stop and resume with MX_JAX_EVIDENCE="
    assert settle([], [ROW]) == f"{head}none, now {shown}{tail}off\n"
    assert not (tmp_path / "former.json").exists()
    where = f"{tmp_path / 'former.json'}, on NVIDIA H200, JAX 0.12.0, driver 580.95.05\n"
    assert settle([ROW], []) == f"{head}{shown}, now none{tail}{where}"
    assert read(tmp_path / "former.json") == (ROW,)
    assert settle([OTHER], [ROW]).startswith(head)
    assert read(tmp_path / "former.json") == (OTHER,)


def test_the_same_kernels_are_not(settle, tmp_path: Path):
    assert settle([ROW], [NEWER]) == settle([], []) == ""
    # At a run's start there is no former choice, nor in what was saved before any was recorded.
    assert settle([], [ROW], step=0) == settle(None, [ROW]) == ""
    assert not (tmp_path / "former.json").exists()


@pytest.mark.slow
def test_checkpoints_hold_the_rows(
    call, results, at_step, monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path
):
    steps = []

    def found(function, *arguments):
        steps.append(int(arguments[-1]))
        return (ROW,)

    monkeypatch.setattr(inspect, "evidence_of", found)
    at_step(4, lambda: signal.raise_signal(signal.SIGINT))
    assert call("--recipes", "float32") == 130
    (run,) = results()["runs"]
    assert run["evidence"] == [as_json(ROW)] and steps == [0]
    capsys.readouterr()
    monkeypatch.setattr(inspect, "evidence_of", lambda *_: ())
    assert call("--recipes", "float32", "--resume") == 0
    path = tmp_path / "out" / "checkpoints" / "float32-seed0.evidence.json"
    assert f"MX_JAX_EVIDENCE={path}, on NVIDIA H200" in capsys.readouterr().err
    assert read(path) == (ROW,)
    assert results()["runs"][0]["evidence"] == []
