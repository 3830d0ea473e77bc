"""What was measured of products by kernels, on which device: frozen rows that switch kernels on.

A kernel behind the reference is not asked, until a row says that on this device it is right and
faster than what would compute the product without it. Of casts there are no rows: a kernel that is
faster alone makes a step slower, since XLA then fuses less (measured on an H200).
"""

import dataclasses
import functools
import hashlib
import json
import logging
import math
import os
import re
import tempfile
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import platformdirs

from mx_jax.backends.calls import Call, MatmulCall, PackCall, RaggedCall
from mx_jax.backends.target import Backend, Target
from mx_jax.formats import WHOLE, BlockFormat, ElementFormat, ScaleFormat

# What a measurement stands for: a kind of call, and the sizes that it speaks of -------------------

Kind = Literal["product", "ragged product", "ragged sums"]
# Largest rows of each bucket. Kernels change their tiles at 8, 16, 32 and 64, and may decode the
# weights for XLA's product from 256 or 1024 rows on: a bucket never spans such a change.
ROWS = (1, 8, 16, 32, 64, 255, 1023, math.inf)
# Most elements of each class of sizes.
SIZES = (2**20, 2**22, 2**24, 2**26, 2**28, math.inf)
# Most groups of each class of mixtures.
GROUPS = (8, 32, 128, math.inf)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Calls that one measurement stands for.

    Attributes:
      kind: of call.
      formats: of lhs and rhs, None for high precision.
      dtypes: of lhs and rhs, None where quantized, and of the product.
      packed: whether the backend itself packed the weights.
      rows: of the activations, at most, in groups of a group on average.
      size: elements of all weights, at most.
      groups: of rows, each with a matrix of its own, or a sum, at most; 0 where there are none.
    """

    kind: Kind
    formats: tuple[BlockFormat | None, ...]
    dtypes: tuple[np.dtype | None, ...]
    packed: bool = False
    rows: float = math.inf
    size: float = math.inf
    groups: float = 0

    @classmethod
    def of(cls, call: Call, backend: str) -> "Work | None":
        """What a call is for a backend; None of what nobody measures, such as batches.

        Args:
          call: of constant sizes.
          backend: its name: weights that another one packed are not packed for it.
        """
        kind: Kind
        if isinstance(call, RaggedCall):
            kind = "ragged sums" if call.contracts_rows else "ragged product"
            number, weights = max(call.num_groups, 1), call.rhs
            rows, groups = -(-call.lhs.shape[0] // number), _least(GROUPS, number)
        elif isinstance(call, MatmulCall) and not call.num_batch:
            kind, groups, swapped = "product", 0, call.rhs.format is None
            weights, activations = (call.lhs, call.rhs) if swapped else (call.rhs, call.lhs)
            rows = activations.rows
        else:
            return None
        return cls(
            kind=kind,
            formats=(call.lhs.format, call.rhs.format),
            dtypes=(call.lhs.dtype, call.rhs.dtype, call.out_dtype),
            packed=call.rhs.packed_by == backend,
            rows=_least(ROWS, rows),
            size=_least(SIZES, math.prod(weights.shape)),
            groups=groups,
        )

    def serves(self, call: PackCall) -> bool:
        """Whether it is a product by weights that such a call packs, of any number of rows.

        Its dtype has to be theirs: weights of a float32 model meet float32 activations, for which
        they would be unpacked again.
        """
        batch = [call.weights.shape[axis] for axis in call.weights.axes.batch]
        return (
            self.packed
            and self.formats == (call.lhs_format, call.format)
            and call.dtype in (None, self.dtypes[-1])
            and self.size == _least(SIZES, math.prod(call.weights.shape))
            and self.groups == (_least(GROUPS, math.prod(batch)) if batch else 0)
        )

    @property
    def lowest_rows(self) -> int:
        """The least rows that it speaks of."""
        return next((int(end) + 1 for end in reversed(ROWS) if end < self.rows), 1)

    def __str__(self) -> str:
        text = " x ".join("bf16" if own is None else own.name for own in self.formats)
        if self.groups:
            what = "rows" if self.kind == "ragged product" else "sums"
            most = f"up to {self.groups} groups" if self.groups < math.inf else "many groups"
            text += f", {what} in {most}"
        return text + ", packed" * self.packed


def _least(limits: tuple[float, ...], size: int) -> float:
    """The least of some limits that a size does not exceed."""
    return next(limit for limit in limits if size <= limit)


# One measurement of one kernel, and files of them -------------------------------------------------

# Of files; another number means other rows.
SCHEMA = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured of one kernel on one device.

    Attributes:
      backend: its name.
      kernel: that the backend took; empty if it has no names for them.
      work: what the row stands for.
      shape: what was measured: (m, n, k).
      device_kind: as JAX calls the device.
      jax: version.
      source: hash of the kernel's source.
      error: the largest, over what is allowed; None if it failed.
      failed: why there are no numbers: it crashed, hung or was refused.
      over_plain: time of the plain path over the kernel's: of what computes the call without any
        row, by XLA's scaled dot where there is one, from weights that are packed for that.
      plain: name of the backend that this is; empty of the plain path itself.
      over_unpacking: the same where the weights are packed, and the plain path unpacks them first.
      over_bfloat16: time of XLA's bfloat16 product over the kernel's.
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
    error: float | None = None
    failed: str = ""
    over_plain: float | None = None
    plain: str = ""
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
        """Whether the kernel is to take such calls: nothing else computes them as fast."""
        return self.is_right and self.speed > 1

    @property
    def is_slower_than_bfloat16(self) -> bool:
        """Whether it is, or was not timed beside it."""
        return (self.over_bfloat16 or 0.0) <= 1

    @property
    def switches_packing_on(self) -> bool:
        """Whether weights are to be packed for such calls."""
        return self.switches_on and self.work.packed and (self.over_plain or 0.0) > 1

    @property
    def place(self) -> tuple[Any, ...]:
        """What it is a row about: a later row of the same place replaces it."""
        where = (self.device_kind, self.jax, self.source, self.driver)
        return (self.backend, self.work, self.shape, *where)

    def __str__(self) -> str:
        where = f"measured on {self.device_kind}, {self.date}"
        if self.failed:
            return f"{where}: failed: {self.failed}"
        if not self.is_right:
            return f"{where}: wrong, with {self.error:.3g} times the error that is allowed"
        unpacks = self.over_unpacking if self.work.packed else None
        more = "" if unpacks is None else f" ({unpacks:.2g} where that unpacks weights first)"
        if self.is_slower_than_bfloat16 and self.over_bfloat16 is not None:
            more += f", slower than bfloat16 ({self.over_bfloat16:.2g} of its speed)"
        if self.over_plain is None:
            return f"{where}: right{more}"
        return f"{where}: {self.over_plain:.2g} times the plain path's speed{more}"


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
    """Facts of one row, no names that a later version may give another meaning."""
    facts = dataclasses.asdict(row) | {"versions": dict(row.versions)}
    facts["work"] |= {name: None for name in _LIMITS if getattr(row.work, name) == math.inf}
    text = json.dumps(facts, default=lambda x: x.name if isinstance(x, np.dtype) else x.value)
    return json.loads(text)


def from_json(facts: dict[str, Any]) -> Row:
    """What `as_json` wrote; KeyError, TypeError or ValueError of anything else."""
    work = facts["work"]
    limits = {name: math.inf if work[name] is None else int(work[name]) for name in _LIMITS}
    row = Row(
        **{
            **facts,
            "work": Work(
                kind=work["kind"],
                formats=tuple(None if own is None else _format(own) for own in work["formats"]),
                dtypes=tuple(None if own is None else np.dtype(own) for own in work["dtypes"]),
                packed=bool(work["packed"]),
                **limits,
            ),
            "shape": tuple(facts["shape"]) if isinstance(facts["shape"], list) else None,
            "versions": tuple((str(n), str(v)) for n, v in facts["versions"].items()),
        }
    )
    for field, kinds in _KINDS.items():
        if not isinstance(getattr(row, field), kinds):
            raise TypeError(f"{field} must not be {getattr(row, field)!r}")
    return row


def _format(facts: dict[str, Any]) -> BlockFormat:
    scale = dict(facts["scale"])
    if scale["element"] is not None:
        scale["element"] = ElementFormat(**scale["element"])
    kept, contracting = (WHOLE if size == WHOLE.value else size for size in facts["block"])
    parts = {"element": ElementFormat(**facts["element"]), "scale": ScaleFormat(**scale)}
    return BlockFormat(**{**facts, **parts, "block": (kept, contracting)})


_LIMITS = ("rows", "size", "groups")
_TEXT, _NUMBER = (str,), (int, float, type(None))
_KINDS = {
    **dict.fromkeys(("backend", "kernel", "device_kind", "jax", "source", "failed", "date"), _TEXT),
    "plain": _TEXT,
    **dict.fromkeys(("error", "over_plain", "over_unpacking", "over_bfloat16"), _NUMBER),
    "driver": (str, type(None)),
    "shape": (tuple,),
}


# Which rows count here: those that ship with the library, and those of the user's own GPU ---------

# off: none count; shipped: those of the library alone; else a file of rows, which alone count.
VARIABLE = "MX_JAX_EVIDENCE"
SHIPPED = Path(__file__).with_suffix(".json")

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
                f"evidence.use: needs rows of type Row, got row={row!r}; evidence.read gives "
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
    wanted, processes = os.environ.get(VARIABLE, ""), jax.process_count()
    if wanted == "off":
        return ()
    shipped = read(SHIPPED)
    if processes > 1 and wanted not in ("", "shipped"):
        _logger.warning(
            "evidence: with several processes only shipped rows count, got %s=%r, process_count=%d",
            VARIABLE,
            wanted,
            processes,
        )
    if wanted == "shipped" or processes > 1:
        return shipped
    if not wanted:
        path = cache_path()
        try:
            cached = read(path) if path.exists() else ()
        except (OSError, ValueError) as error:
            _logger.warning("%s; until then it counts as empty", error)
            cached = ()
        return merged(shipped, (row for row in cached if row.driver == driver()))
    rows = read(Path(wanted), VARIABLE)
    counted = tuple(row for row in rows if row.driver == driver())
    if len(counted) < len(rows):
        others = {row.driver for row in rows} - {driver()}
        _logger.warning(
            "evidence: rows count only for the driver that they were measured with: %d of %d "
            "in %s=%r do not count, measured with driver=%s, got driver=%s; `python -m mx_jax "
            "gpu` measures here",
            len(rows) - len(counted),
            len(rows),
            VARIABLE,
            wanted,
            ", ".join(sorted(map(str, others))),
            driver(),
        )
    return counted


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


# GPUs that differ from another one in their memory alone, the one with fewer bytes a second first:
# it gains as much at least where codes are read in place of bfloat16.
_CHIPS = {"NVIDIA H100 80GB HBM3": "NVIDIA H200"}


def row_about(call: Call, backend: Backend, target: Target) -> Row | None:
    """What is known of a backend's kernel for a call that it takes; None if nothing is.

    Of several shapes that stand for the call the worst decides. Where weights are packed, the rows
    of their products are unknown: the best bucket decides. Packed weights then meet any number of
    rows: of one that was not measured, the nearest one that was decides.
    """

    def machine(name: str, device_kind: str | None, version: str) -> Any:
        # Versions of JAX such as 0.12 and 0.12.1 differ in mended faults alone.
        return name, _CHIPS.get(device_kind or "", device_kind), version.split(".")[:2]

    def worst(work: Work | None) -> Row | None:
        fitting = (row for row in here if row.work == work)
        return min(fitting, key=lambda row: (row.is_right, row.speed), default=None)

    own = machine(backend.name, target.device_kind, jax.__version__)
    here = [row for row in in_force() if machine(row.backend, row.device_kind, row.jax) == own]
    # Most calls end here: no source is read for nothing.
    here = [row for row in here if row.source == source_of(backend)]
    if isinstance(call, PackCall):
        works = dict.fromkeys(row.work for row in here if row.work.serves(call))
        best = [row for work in works if (row := worst(work)) is not None]
        return max(
            best, key=lambda row: (row.switches_packing_on, row.over_plain or 0.0), default=None
        )
    work = Work.of(call, backend.name) if here else None
    if work is not None and work.packed:
        most, rows = 4 * ROWS[-2], work.rows
        other = {row.work for row in here if dataclasses.replace(row.work, rows=rows) == work}
        octaves = {each: math.log2(min(each.rows, most) / min(rows, most)) for each in other}
        work = min(octaves, key=lambda each: abs(octaves[each]), default=work)
    return worst(work)


def switches_on(call: Call, row: Row | None) -> bool:
    """Whether what was measured says that a kernel is to take a call."""
    if row is None:
        return False
    return row.switches_packing_on if isinstance(call, PackCall) else row.switches_on


def why_asleep(call: Call, row: Row | None, target: Target) -> str:
    """Why a backend behind the reference is asked only by name."""
    if row is not None:
        return str(row)
    if not isinstance(call, MatmulCall | RaggedCall | PackCall):
        return "faster alone, but not in a step, as an H200 was measured"
    how = "`python -m mx_jax gpu` measures it"
    if target.device_kind is None:
        return f"not proved on hardware yet; on a GPU {how}"
    if target.num_devices > 1:
        return (
            "not proved on several devices, which jit may split the call between: "
            f"num_devices={target.num_devices}"
        )
    return f"not proved on hardware: nothing was measured of this on {target.device_kind}; {how}"
