"""Scores, by module and of all, and the page that says them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from tests.mutation.explained import EXPLAINED, Explanation
from tests.mutation.mutants import Mutant
from tests.mutation.session import Known

THRESHOLD = 0.9


@dataclasses.dataclass(frozen=True)
class Result:
    """A mutant, what became of it, and whether a test failed at the first try."""

    mutant: Mutant
    known: Known
    at_once: bool

    @property
    def explanation(self) -> Explanation | None:
        """Why it survived, where somebody has looked."""
        if self.known.killed:
            return None
        place = self.mutant.place
        return EXPLAINED.get((place.module, self.mutant.before, self.mutant.after))

    @property
    def is_equivalent(self) -> bool:
        """Whether it gives the same for every input, so that no test can find it."""
        return self.explanation is not None and self.explanation.equivalent


@dataclasses.dataclass(frozen=True)
class Score:
    """Counts of mutants. The score is `killed / (tried - equivalent)`."""

    places: int
    tried: int
    killed: int
    equivalent: int

    @property
    def survivors(self) -> int:
        return self.tried - self.killed - self.equivalent

    @property
    def value(self) -> float:
        counted = self.tried - self.equivalent
        return self.killed / counted if counted else 1.0

    @property
    def interval(self) -> tuple[float, float]:
        """95 in 100 such samples have the score of all mutants within (Wilson)."""
        n, p, z = self.tried - self.equivalent, self.value, 1.96
        if not n or self.tried == self.places:
            return p, p
        middle, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return (middle - spread) / (1 + z * z / n), (middle + spread) / (1 + z * z / n)


def score(places: int, results: Sequence[Result]) -> Score:
    """The score of results that were drawn from so many places."""
    return Score(
        places=places,
        tried=len(results),
        killed=sum(result.known.killed for result in results),
        equivalent=sum(result.is_equivalent for result in results),
    )


def rows(places: dict[str, int], results: Sequence[Result]) -> list[tuple[str, Score]]:
    """A score for each module, and the last for all of them."""
    found = [
        (module, score(count, [r for r in results if r.mutant.place.module == module]))
        for module, count in places.items()
    ]
    return [*found, ("all", score(sum(places.values()), results))]


def record(places: dict[str, int], results: Sequence[Result], made: dict[str, Any]) -> dict:
    """What `results.json` holds."""
    survivors = [
        {
            "module": r.mutant.place.module,
            "line": r.mutant.place.line,
            "before": r.mutant.before,
            "after": r.mutant.after,
            "equivalent": r.is_equivalent,
            "why": r.explanation.why if r.explanation else None,
        }
        for r in results
        if not r.known.killed
    ]
    table = {name: dataclasses.asdict(of) for name, of in rows(places, results)}
    whole = score(sum(places.values()), results)
    return made | {
        "score": round(whole.value, 4),
        "at_once": sum(result.at_once for result in results),
        "interval": [round(end, 4) for end in whole.interval],
        "modules": table,
        "survivors": survivors,
    }


def page(record: dict[str, Any]) -> str:
    """`results.md`, from what `results.json` holds."""
    low, high = record["interval"]
    lines = [
        "# Mutation testing of the numeric core",
        "",
        f"Score {record['score']:.3f} (95 % interval {low:.3f} to {high:.3f}, of a random "
        f"sample of {record['share']:.0%} of the mutants of each module, seed {record['seed']}). "
        f"{record['date']}, {record['tool']}, jax {record['jax']}, Python {record['python']}.",
        "",
        "The score is killed / (tried - equivalent). Survivors of a sample became tests, so the",
        "same sample scores higher than a new one would, with another seed. Killed at the first",
        f"try were {record['at_once']}.",
        "",
        "| module | mutants | tried | killed | equivalent | survivors | score |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, counts in record["modules"].items():
        of = Score(**counts)
        cells = [name, of.places, of.tried, of.killed, of.equivalent, of.survivors]
        lines.append(f"| {' | '.join(map(str, cells))} | {of.value:.2f} |")
    for title, equivalent in (("Survivors", False), ("Equivalent mutants", True)):
        lines += ["", f"## {title}", ""]
        for one in record["survivors"]:
            if one["equivalent"] == equivalent:
                lines += [
                    f"- `{one['module']}`, line {one['line']}:",
                    f"    - was `{one['before']}`",
                    f"    - is `{one['after']}`",
                    f"    - {one['why'] or 'not yet looked at'}",
                ]
    return "\n".join(lines) + "\n"
