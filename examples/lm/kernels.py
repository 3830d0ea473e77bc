"""Which measured kernels a run is computed by: a resumed run says so where they are others."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from mx_jax.backends.evidence import Row, as_json, from_json, write

from .disk import writing
from .storage import Run


def settle_evidence(run: Run, rows: Sequence[Row], path: Path) -> None:
    """Records the rows by which kernels take a run's products from here on.

    A kernel and what stands in for it add in different orders. So a run that goes on with others
    does not end bit by bit where an undisturbed one ends: it says so, and how to have the former.

    Args:
      run: as its checkpoint has it, or a new one.
      rows: what `mx_jax.inspect.evidence_of` finds of its step.
      path: where the former rows are written, if they are others.
    """
    then = None if run.evidence is None else [from_json(facts) for facts in run.evidence]
    run.evidence = [as_json(row) for row in rows]
    if then is None or not run.step or _choices(then) == _choices(rows):
        return
    former = "off"
    if then:
        with writing("the evidence of the checkpoint", path.parent):
            write(path, then)
        former = str(path)
    print(
        f"{run.label}: goes on with other kernels than those before step {run.step:,}, which round "
        f"otherwise: then {_named(then)}, now {_named(rows)}; to continue with the former, "
        f"stop and resume with MX_JAX_EVIDENCE={former}{_needs(then)}",
        file=sys.stderr,
    )


def _choices(rows: Sequence[Row]) -> set[object]:
    return {(row.backend, row.kernel, row.work, row.source) for row in rows}


def _named(rows: Sequence[Row]) -> str:
    return ", ".join(f"{row.backend} {row.kernel} for {row.work}" for row in rows) or "none"


def _needs(rows: Sequence[Row]) -> str:
    """Rows count where they were measured alone."""
    places = {(row.device_kind, row.jax, row.driver) for row in rows}
    shown = [f"{kind}, JAX {jax}, driver {driver}" for kind, jax, driver in sorted(places, key=str)]
    return f", on {'; '.join(shown)}" if shown else ""
