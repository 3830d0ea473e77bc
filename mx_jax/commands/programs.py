"""Layouts by the name of the program that uses them."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mx_jax.checkpoint.layout import Layout
from mx_jax.checkpoint.layouts import LAYOUTS
from mx_jax.commands.stream import OWN
from mx_jax.mxarray import MXArray


def layout_for(to: str, tensors: Mapping[str, Any], where: Path) -> str:
    """The layout that is meant by its name, or by that of a program and what it is to hold.

    Args:
      to: the name.
      tensors: by name, with the formats that they have or get.
      where: they come from, for the error.

    Raises:
      ValueError: a program that has none for the formats that are there.
    """
    known = programs()
    if to == OWN or to not in known:
        return to
    held = {name: x.format for name, x in tensors.items() if isinstance(x, MXArray)}
    fitting = [
        row.name
        for row in known[to]
        if all(dataclasses.replace(f, name=row.format.name) == row.format for f in held.values())
    ]
    if held and len(fitting) == 1:
        return fitting[0]
    formats = {format.name: name for name, format in held.items()}
    shown = ", ".join(f"{format} ({name})" for format, name in formats.items()) or "no MXArray"
    names = ", ".join(fitting or [row.name for row in known[to]])
    raise ValueError(f"{where}: {to} has no one layout for {shown}; name one of {names}")


def program_of(to: str) -> str | None:
    """The program that `--to` names; None where it names a layout."""
    return to if to in programs() else None


def programs() -> dict[str, list[Layout]]:
    """Layouts by the programs that a `quantization_config` names."""
    found: dict[str, list[Layout]] = {}
    for row in LAYOUTS:
        for pairs in row.configs:
            rows = found.setdefault(dict(pairs).get("quant_method", ""), [])
            rows += [] if row in rows else [row]
    return found
