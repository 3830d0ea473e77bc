"""One measurement of one kernel, and files of them."""

import dataclasses
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mx_jax.backends.evidence import work as works
from mx_jax.backends.evidence.work import Work
from mx_jax.backends.target import Config

# Of files; another number means other rows.
SCHEMA = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured of one kernel on one device.

    Attributes:
      backend: its name.
      kernel: that the backend took; empty if it has no names for them.
      work: what the row stands for.
      shape: what was measured: (m, n, k), or (rows, columns).
      device_kind: as JAX calls the device.
      jax: version.
      source: hash of the kernel's source.
      config: what the kernel is told, such as its tiles; none for its own.
      error: the largest, over what is allowed; None if it failed.
      failed: why there are no numbers: it crashed, hung or was refused.
      over_plain: time of the plain path, which takes MXArrays, over the kernel's.
      over_unpacking: the same where the weights are packed, and the plain path unpacks them first.
      over_bfloat16: time of XLA's bfloat16 product, or of a copy beside casts, over the kernel's.
      driver: version of NVIDIA's driver.
      versions: (package, version) of what else was there.
      date: ISO day.
    """

    backend: str
    kernel: str
    work: Work
    shape: tuple[int, ...]
    device_kind: str
    jax: str
    source: str
    config: Config = ()
    error: float | None = None
    failed: str = ""
    over_plain: float | None = None
    over_unpacking: float | None = None
    over_bfloat16: float | None = None
    driver: str | None = None
    versions: tuple[tuple[str, str], ...] = ()
    date: str

    @property
    def is_right(self) -> bool:
        """Whether its numbers are: never those of what failed."""
        return not self.failed and self.error is not None and self.error <= 1

    @property
    def speed(self) -> float:
        """Over what computes the same call otherwise; 0 if nothing was timed."""
        return (self.over_unpacking if self.work.packed else self.over_plain) or 0.0

    @property
    def switches_on(self) -> bool:
        """Whether the kernel is to take such calls."""
        return self.is_right and self.speed > 1

    @property
    def switches_packing_on(self) -> bool:
        """Whether weights are to be packed for such calls."""
        return self.switches_on and self.work.packed and (self.over_plain or 0.0) > 1

    @property
    def place(self) -> tuple[Any, ...]:
        """What it is a row about: a later row of the same place replaces it."""
        where = (self.device_kind, self.jax, self.source, self.driver)
        return (self.backend, self.work, self.shape, *where)

    @property
    def choice(self) -> tuple[Any, ...]:
        """What it lets compute what: rows of equal choices let programs compute alike."""
        return (self.backend, self.kernel, self.config, self.work, self.source)

    def __str__(self) -> str:
        where = f"measured on {self.device_kind}, {self.date}"
        if self.failed:
            return f"{where}: failed: {self.failed}"
        if not self.is_right:
            return f"{where}: wrong, with {self.error:.3g} times the error that is allowed"
        unpacks = self.over_unpacking if self.work.packed else None
        more = "" if unpacks is None else f" ({unpacks:.2g} where that unpacks weights first)"
        told = ", ".join(f"{name}={at}" for name, at in self.config)
        more += f", with {told}" if told else ""
        return f"{where}: {self.over_plain or 0.0:.2g} times the plain path's speed{more}"


def merged(*groups: Iterable[Row]) -> tuple[Row, ...]:
    """All rows; of those about the same place the last."""
    return tuple({row.place: row for rows in groups for row in rows}.values())


def read(path: Path, operation: str = "evidence") -> tuple[Row, ...]:
    """Rows of a file.

    Args:
      path: that `write` wrote.
      operation: what messages name.

    Raises:
      ValueError: the file cannot be read, is damaged, or is of another schema.
    """
    remedy = "measure again with `python -m mx_jax gpu`, or remove the file"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        schema = found["schema"]
        if schema == SCHEMA:
            return tuple(from_json(facts) for facts in found["rows"])
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{operation}: needs a file of measured rows as `python -m mx_jax gpu` writes it, got "
            f"path={str(path)!r}: {error!r}; {remedy}"
        ) from None
    raise ValueError(
        f"{operation}: needs rows of schema {SCHEMA}, got schema={schema!r} in "
        f"path={str(path)!r}; {remedy}"
    )


def write(path: Path, rows: Iterable[Row]) -> None:
    """A file of rows, whole or not at all: who reads meanwhile finds the former one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {"schema": SCHEMA, "rows": [as_json(row) for row in rows]}
    text = json.dumps(found, indent=1, allow_nan=False) + "\n"
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def as_json(row: Row) -> dict[str, Any]:
    """Of one row."""
    facts = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    own = {"work": works.as_json(row.work), "shape": list(row.shape), "config": dict(row.config)}
    return facts | own | {"versions": dict(row.versions)}


def from_json(facts: dict[str, Any]) -> Row:
    """What `as_json` wrote; KeyError, TypeError or ValueError of anything else."""
    row = Row(
        **{
            **facts,
            "work": works.from_json(facts["work"]),
            "shape": tuple(facts["shape"]) if isinstance(facts["shape"], list) else None,
            "config": tuple(sorted((str(n), int(at)) for n, at in facts["config"].items())),
            "versions": tuple((str(n), str(v)) for n, v in facts["versions"].items()),
        }
    )
    for field, kinds in _KINDS.items():
        if not isinstance(getattr(row, field), kinds):
            raise TypeError(f"{field} must not be {getattr(row, field)!r}")
    return row


_TEXT, _NUMBER = (str,), (int, float, type(None))
_KINDS = {
    **dict.fromkeys(("backend", "kernel", "device_kind", "jax", "source", "failed", "date"), _TEXT),
    **dict.fromkeys(("error", "over_plain", "over_unpacking", "over_bfloat16"), _NUMBER),
    "driver": (str, type(None)),
    "shape": (tuple,),
}
