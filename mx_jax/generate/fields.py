"""Fields of a model's files, which may be damaged: read by type, or refused by file and name."""

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Fields:
    """What a file says, by name.

    Attributes:
      said: the fields; one that is None is as if it were missing.
      where: the file's path, for errors.
      prefix: of the names, as the file has them.
    """

    said: Mapping[str, Any]
    where: str
    prefix: str = ""

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self._value(name, default)
        if not _is_number(value) or not math.isfinite(value) or value != int(value) or value < 1:
            raise self._no(name, "a whole number of at least 1", value)
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._value(name, default)
        if not _is_number(value) or not math.isfinite(value) or value <= 0:
            raise self._no(name, "a finite number above 0", value)
        return float(value)

    def table(self, *names: str) -> dict[str, Any]:
        """The first of these fields that says something; an empty table where none does."""
        for name in names:
            if value := self.said.get(self.prefix + name):
                if not isinstance(value, Mapping):
                    raise self._no(name, "a table", value)
                return dict(value)
        return {}

    def text(self, name: str, default: str | None = None) -> str:
        """A text that UTF-8 can hold: JSON's escapes may spell one that it cannot."""
        value = self._value(name, default)
        if not isinstance(value, str) or value != value.encode(errors="replace").decode():
            raise self._no(name, "a text", value)
        return value

    def has(self, name: str) -> bool:
        """Whether the field says something."""
        return self.said.get(self.prefix + name) is not None

    def _value(self, name: str, default: Any) -> Any:
        value = self.said.get(self.prefix + name)
        value = default if value is None else value
        if value is None:
            raise ValueError(f"generate: {self.where} lacks the field {self.prefix}{name}")
        return value

    def _no(self, name: str, needed: str, value: Any) -> ValueError:
        return ValueError(
            f"generate: {self.where}: needs {needed} as {self.prefix}{name}, "
            f"got {self.prefix}{name}={value!r:.80}"
        )


def _is_number(value: Any) -> bool:
    """Booleans are none, although Python counts them in."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
