"""Which rows count here: those that ship with the library, and those of the user's own GPU."""

import functools
import hashlib
import logging
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import jax
import platformdirs

from mx_jax.backends.calls import Call, PackCall
from mx_jax.backends.evidence.rows import Row, merged, read
from mx_jax.backends.evidence.work import Work
from mx_jax.backends.target import Backend, Target

# off: none count; shipped: those of the library alone; else a file of rows, which alone count.
VARIABLE = "MX_JAX_EVIDENCE"
SHIPPED = Path(__file__).parent / "shipped.json"

_logger = logging.getLogger(__name__)
# Rows enter jit's cache key; None: those of `loaded`, which are the same throughout a process.
_in_use = jax.make_user_context(default_value=None)


def use(rows: Iterable[Row]) -> AbstractContextManager[None]:
    """A context in which these rows count, and no others.

    They still have to be of the device, the version of JAX and the source that are here. It enters
    jit's cache key.

    Args:
      rows: what was measured; none switches every kernel off that stands behind the reference.

    Returns:
      The context manager.

    Raises:
      TypeError: something that is no row.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> from mx_jax.backends import evidence
      >>> with evidence.use(()):
      ...     mx_jax.quantize(jnp.ones(32), "mxfp4").shape
      (32,)
    """
    rows = tuple(rows)
    for row in rows:
        if not isinstance(row, Row):
            raise TypeError(
                f"evidence.use: needs rows of type Row, got row={row!r}; evidence.rows.read gives "
                "those of a file"
            )
    return _in_use(rows)


def in_force() -> tuple[Row, ...]:
    """The rows that count here."""
    rows = _in_use.value
    return loaded() if rows is None else rows


def cache_path() -> Path:
    """The file that `python -m mx_jax gpu` writes rows to."""
    return Path(platformdirs.user_cache_dir("mx_jax", appauthor=False)) / "evidence.json"


@functools.cache
def loaded() -> tuple[Row, ...]:
    """The rows of files, read once a process.

    Shipped rows and the user's own, of which a driver's are for that driver. Of several processes
    each has to trace the same program, so there only shipped rows count.

    Raises:
      ValueError: `MX_JAX_EVIDENCE` names a file that cannot be read. The user's own cache never
        raises: where it is damaged, that is logged, and it counts as empty.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted == "off":
        return ()
    shipped = read(SHIPPED)
    if wanted == "shipped" or jax.process_count() > 1:
        if wanted not in ("", "shipped"):
            _logger.warning(
                "evidence: with several processes only shipped rows count, got %s=%r, "
                "process_count=%d",
                VARIABLE,
                wanted,
                jax.process_count(),
            )
        return shipped
    if wanted:
        return _named(wanted)
    return merged(shipped, _of_this_driver(_cached()))


def _named(path: str) -> tuple[Row, ...]:
    """Rows of a file that the user names; what does not count is told."""
    rows = read(Path(path), VARIABLE)
    counted = _of_this_driver(rows)
    if len(counted) < len(rows):
        others = {row.driver for row in rows} - {driver()}
        _logger.warning(
            "evidence: rows count only for the driver that they were measured with: %d of %d "
            "in %s=%r do not count, measured with driver=%s, got driver=%s; `python -m mx_jax "
            "gpu` measures here",
            len(rows) - len(counted),
            len(rows),
            VARIABLE,
            path,
            ", ".join(sorted(map(str, others))),
            driver(),
        )
    return counted


def _cached() -> tuple[Row, ...]:
    path = cache_path()
    try:
        return read(path) if path.exists() else ()
    except (OSError, ValueError) as error:
        _logger.warning("%s; until then it counts as empty", error)
        return ()


def _of_this_driver(rows: Sequence[Row]) -> tuple[Row, ...]:
    return tuple(row for row in rows if row.driver == driver())


@functools.cache
def driver() -> str | None:
    """Version of NVIDIA's driver, e.g. `"580.95.05"`; None where there is none."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return None if found is None else found[1]


@functools.cache
def source_of(backend: Backend) -> str | None:
    """A hash of the source that decides what a backend's kernels compute; None if it names none."""
    if backend.source is None:
        return None
    found = hashlib.sha256()
    for path in sorted(backend.source()):
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def row_about(call: Call, backend: Backend, target: Target) -> Row | None:
    """What is known of a backend's kernel for a call that it takes; None if nothing is.

    Of several shapes that stand for the call the worst decides. Where weights are packed, the rows
    of their products are unknown: the best bucket decides.
    """
    here = [
        row
        for row in in_force()
        if (row.backend, row.device_kind, row.jax)
        == (backend.name, target.device_kind, jax.__version__)
    ]
    # Most calls end here: no source is read for nothing.
    here = [row for row in here if row.source == source_of(backend)]
    if isinstance(call, PackCall):
        works = dict.fromkeys(row.work for row in here if row.work.serves(call))
        best = [row for work in works if (row := _worst(here, work)) is not None]
        return max(
            best, key=lambda row: (row.switches_packing_on, row.over_plain or 0.0), default=None
        )
    return _worst(here, Work.of(call, backend.name)) if here else None


def _worst(rows: Iterable[Row], work: Work | None) -> Row | None:
    fitting = (row for row in rows if row.work == work)
    return min(fitting, key=lambda row: (row.is_right, row.speed), default=None)


def switches_on(call: Call, row: Row | None) -> bool:
    """Whether what was measured says that a kernel is to take a call."""
    if row is None:
        return False
    return row.switches_packing_on if isinstance(call, PackCall) else row.switches_on


def why_asleep(row: Row | None, target: Target) -> str:
    """Why a backend behind the reference is asked only by name."""
    if row is not None:
        return str(row)
    how = "`python -m mx_jax gpu` measures it"
    if target.device_kind is None:
        return f"not proved on hardware yet; on a GPU {how}"
    if target.num_devices > 1:
        return (
            "not proved on several devices, which jit may split the call between: "
            f"num_devices={target.num_devices}"
        )
    return f"not proved on hardware: nothing was measured of this on {target.device_kind}; {how}"
