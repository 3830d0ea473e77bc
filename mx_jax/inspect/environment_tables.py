"""What `environment.describe` found, as tables for people."""

from typing import Any

from rich.markup import escape
from rich.table import Table


def tables(found: dict[str, Any]) -> list[Table]:
    """One table for each kind of facts."""
    facts = {
        "Versions": found["versions"] | {"system": found["system"]},
        "C++ library": _library(found["cpu_library"]),
        "Variables": {name: value or "-" for name, value in found["variables"].items()},
    }
    if "error" not in found:
        facts["Devices"] = _devices(found)
    pairs = [_pairs(title, rows, "what", "value") for title, rows in facts.items()]
    if "error" in found:
        return pairs
    calls = _pairs("Who computes what by default", found["calls"], "call", "backend")
    return [*pairs, calls, _backends(found)]


def _library(native: dict[str, str | None]) -> dict[str, str]:
    path, used, best = (native[x] for x in ("path", "instruction_set", "best_instruction_set"))
    if path is None or used is None:
        return {"path": "-", "not used, because": f"{native['missing']}"}
    more = "" if best == used else f", where the machine has {best}"
    return {"path": path, "instruction set": used + more}


def _devices(found: dict[str, Any]) -> dict[str, str]:
    target, rows = found["target"], found["devices"]
    capability = target["compute_capability"]
    shown = "" if capability is None else f" {'.'.join(map(str, capability))}"
    return {f"{row['number']} x {row['kind']}": row["platform"] for row in rows} | {
        "calls are for": f"{target['platform']}{shown}, num_devices={target['num_devices']}"
    }


def _pairs(title: str, rows: dict[str, str], *columns: str) -> Table:
    table = Table(*columns, title=title, title_justify="left")
    for row in rows.items():
        table.add_row(*map(escape, row))
    return table


def _backends(found: dict[str, Any]) -> Table:
    columns = "backend", "asked", "takes", "does not take, because"
    table = Table(*columns, title="Backends, in order", title_justify="left")
    for backend in found["backends"]:
        by_reason: dict[str, list[str]] = {}
        for call, reason in backend["rejects"].items():
            by_reason.setdefault(reason, []).append(call)
        reasons = [f"{', '.join(calls)}: {reason}" for reason, calls in by_reason.items()]
        if len(by_reason) == 1 and not backend["takes"]:
            reasons = list(by_reason)
        table.add_row(
            backend["name"],
            "only if named" if backend["only_if_named"] else "by default",
            ", ".join(backend["takes"]) or "-",
            escape("\n".join(reasons)) or "-",
        )
    return table
