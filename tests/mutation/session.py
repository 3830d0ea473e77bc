"""What is known of each mutant: a file to which every outcome is added, so that a run resumes."""

import dataclasses
import json
from pathlib import Path

from tests.mutation.server import Outcome


@dataclasses.dataclass(frozen=True)
class Known:
    """One line of the file.

    Attributes:
      id: of the mutant, or of a module without one.
      killed: whether a test failed.
      test: which one.
      seconds: of CPU.
    """

    id: str
    killed: bool
    test: str
    seconds: float


class Session:
    """Outcomes by mutant, on disk.

    A killed mutant stays killed while its module stays as it is; a survivor is tried again on
    demand, once there are new tests.
    """

    def __init__(self, path: Path):
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._known: dict[str, Known] = {}
        self._at_once: dict[str, bool] = {}
        for line in lines:
            self._remember(Known(**json.loads(line)))

    def get(self, id: str) -> Known | None:
        return self._known.get(id)

    def at_once(self, id: str) -> bool:
        """Whether a test failed at the first try, before there were tests for what survived."""
        return self._at_once[id]

    def _remember(self, known: Known) -> None:
        self._known[known.id] = known
        self._at_once.setdefault(known.id, known.killed)

    def add(self, id: str, outcome: Outcome) -> Known:
        known = Known(id, not outcome.passed, outcome.test, round(outcome.seconds, 2))
        self._remember(known)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(known)) + "\n")
        return known
