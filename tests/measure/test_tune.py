"""Other tiles are checked before they are timed; the best of the right ones is what a row keeps."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mx_jax.backends import evidence
from mx_jax.backends.calls import MatmulCall
from mx_jax.backends.reference import REFERENCE
from mx_jax.backends.target import Backend, Config
from mx_jax.measure import worker
from mx_jax.measure.cases import Case
from mx_jax.measure.worker import QUICK, Effort
from tests.backends.altered import altered

PRODUCT = Case(backend="planted", kind="product", formats=(None, "mxfp4"), shape=(2, 64, 64))
EVERY = dataclasses.replace(QUICK, others=9, checks=None, tuning=600.0)
_config = jax.make_user_context(default_value=())


def _wait(x: np.ndarray) -> np.ndarray:
    time.sleep(2e-3)
    return np.asarray(x)


def _multiply(lhs, rhs, call):
    """By itself it waits, as it does with what does not concern it."""
    config = dict(_config.value)
    out = REFERENCE.run(call, lhs, rhs)
    if "refused" in config:
        raise RuntimeError("needs fewer registers")
    if "wrong" in config:
        return out.at[-1, -1].add(0.5)
    if "wrong for more rows" in config:
        return out + (out.shape[0] == 8)
    return out if "fast" in config else jax.pure_callback(_wait, out, out)


def planted(*configs: Config) -> Backend:
    own = dataclasses.replace(
        REFERENCE,
        name="planted",
        source=lambda: (Path(__file__),),
        configs=lambda call, target: configs,
        configured=lambda kernel, config: _config(config),
    )
    return altered(own, MatmulCall, _multiply)


def said(backend: Backend, effort: Effort = EVERY) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with evidence.use(()):
        worker.measure(PRODUCT, backend, found.append, effort)
    return json.loads(json.dumps(found, allow_nan=False))


FAST = (("fast", 1),)


@pytest.mark.slow
def test_the_fastest_of_the_right_ones():
    slow, wrong, elsewhere, refused = (
        ((name, 1),) for name in ("slow", "wrong", "wrong for more rows", "refused")
    )
    first, *_, last = said(planted(wrong, slow, elsewhere, refused, FAST))
    # By itself first: if a process ends while it tries others, that is what stays.
    assert "config" not in first and first["over_plain"] > 0
    assert last["config"] == dict(FAST)
    assert last["over_plain"] > 1.5 * first["over_plain"]
    tried = {next(iter(found["config"])): found for found in last["tried"]}
    for name in ("wrong", "wrong for more rows"):
        assert tried[name]["error"] > 1 and "speed" not in tried[name]
    assert tried["refused"]["failed"] == "RuntimeError: needs fewer registers"
    assert tried["slow"]["speed"] < 1.5 < tried["fast"]["speed"]


def test_what_is_not_clearly_faster_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker, "_over", lambda *_: 1.01)
    *_, last = said(planted((("slow", 1),)))
    assert "config" not in last and len(last["tried"]) == 1


@pytest.mark.parametrize("changes", [dict(others=0), dict(tuning=0.0)], ids=str)
def test_none_is_tried_without_time(changes: dict[str, Any]):
    *_, last = said(planted(FAST), dataclasses.replace(EVERY, **changes))
    assert last["tried"] == [] and "config" not in last


def test_a_wrong_kernel_is_not_tuned():
    *_, last = said(
        altered(planted(FAST), MatmulCall, lambda lhs, rhs, call: 1 + _multiply(lhs, rhs, call))
    )
    assert last["error"] > 1 and "tried" not in last


def test_what_fails_later_leaves_what_was_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(worker, "_tried", fail)
    monkeypatch.setattr(worker, "THOROUGH", QUICK)
    monkeypatch.setattr(worker, "_backend", lambda case: planted(FAST))
    lines: list[str] = []
    assert worker.answer(json.dumps(dataclasses.asdict(PRODUCT)), lines.append) == 1
    assert json.loads(lines[-1])["over_plain"] > 0
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in capsys.readouterr().err
