"""Where records of a capture go. A sink has `write(record)`, and `close()`."""

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from mx_jax.inspect.capture_record import Record, Scalar
from mx_jax.ops.tags import Tag


class Sink(Protocol):
    """What `capture` tells.

    Examples:
      >>> import mx_jax
      >>> class Largest:
      ...     def __init__(self):
      ...         self.found = float("-inf")
      ...     def write(self, record):
      ...         self.found = max(self.found, getattr(record, "value", self.found))
      ...     def close(self):
      ...         print("largest:", self.found)
      >>> with mx_jax.inspect.capture(sink=Largest()):
      ...     for loss in (4.0, 9.5, 3.0):
      ...         mx_jax.inspect.scalar("loss", loss)
      largest: 9.5
    """

    def write(self, record: Record | Scalar) -> None:
        """Take a record; called from the thread that runs callbacks, one at a time."""
        ...

    def close(self) -> None:
        """The capture ends; it may begin again."""
        ...


class Memory(Mapping[Tag, Sequence[Record]]):
    """Records in memory: a mapping from each tag to its records, as they came.

    Attributes:
      scalars: numbers by name.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> layer = jax.jit(lambda x, w: mx_jax.matmul(x, w, recipe="mxfp8"))
      >>> with mx_jax.inspect.capture() as records:
      ...     _ = layer(jnp.ones((4, 64)), jnp.ones((64, 8)))
      >>> print(*(tag.tensor for tag in records))
      input weight product
    """

    def __init__(self):
        self._records: dict[Tag, list[Record]] = {}
        self.scalars: dict[str, list[Scalar]] = collections.defaultdict(list)

    def __getitem__(self, tag: Tag) -> list[Record]:
        return self._records[tag]

    def __iter__(self) -> Iterator[Tag]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        steps = {record.step for own in self._records.values() for record in own}
        span = f", steps {min(steps)} to {max(steps)}" if steps else ""
        records = sum(map(len, self._records.values()))
        numbers = f"; numbers: {', '.join(self.scalars)}" if self.scalars else ""
        return f"<Memory: {records} records of {len(self)} tags{span}{numbers}>"

    def all(self) -> list[Record]:
        """All records: steps in order, and within a step the order of the program."""
        records = (record for own in self._records.values() for record in own)
        return sorted(records, key=lambda record: (record.step, record.order))

    def write(self, record: Record | Scalar) -> None:
        """Keep it."""
        if isinstance(record, Scalar):
            self.scalars[record.name].append(record)
        else:
            self._records.setdefault(record.tag, []).append(record)

    def close(self) -> None:
        """Nothing ends."""


# Numbers that a row of a table holds.
COLUMNS = (
    "amax",
    "underflow",
    "saturation",
    "nonfinite_blocks",
    "sqnr_db",
    "outlier_ratio",
    "error",
    "cosine",
)


class Numbers:
    """A sink without arrays: below `shard_map` one record tells what is of all devices."""

    def write(self, record: Record | Scalar) -> None:
        """Take a record, unless it is of another device than the first."""
        if isinstance(record, Scalar) or not any(record.shard.values()):
            self._write(record)

    def _write(self, record: Record | Scalar) -> None:
        raise NotImplementedError
