"""`rules.toml`: conversion's rules for tensors of a file."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from mx_jax.calibrate.scales import search_for
from mx_jax.calibrate.ways import GPTQ, SEARCHED
from mx_jax.convert.rules import Rule
from mx_jax.formats import block_format
from mx_jax.recipes import weight_only

_KEYS = {"pattern", "format", "recipe", "scale_rule", "scales", "axis", "skip"}
# How scales are chosen besides a rule.
SCALES = (SEARCHED, GPTQ)
_DECIDING = ("format", "recipe", "skip")


@dataclasses.dataclass(frozen=True)
class FileRule:
    """A rule, and along which axis the tensors that it matches have their blocks.

    Attributes:
      rule: conversion's own; its recipe's weight says format and scale rule.
      axis: of the tensor; None: the one that its name tells.
      scales: how scales and codes are chosen in place of the recipe's scale rule: `"mse"`, each
        block's scale by squared error; `"gptq"`, codes by what they are multiplied with as well.
    """

    rule: Rule
    axis: int | None = None
    scales: str | None = None


def read_rules(path: Path) -> tuple[FileRule, ...]:
    """The rules of a file, in order.

    Raises:
      FileNotFoundError: there is none.
      ValueError: no TOML, or no rules, with the number of the one that is wrong.
    """
    try:
        found = tomllib.loads(path.read_bytes().decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"rules: {path} is no TOML: {error}") from error
    rows = found.get("rule")
    if not isinstance(rows, list) or set(found) != {"rule"} or not rows:
        raise ValueError(
            f"rules: {path} must consist of [[rule]] tables, got {', '.join(found) or 'nothing'}"
        )
    return tuple(_rule(row, f"rules: {path}: rule {i}") for i, row in enumerate(rows))


def format_rule(
    pattern: str,
    format: Any,
    scale_rule: Any = None,
    axis: int | None = None,
    scales: str | None = None,
) -> FileRule:
    """A rule that stores weights in a format, by the scale rule that loses least for it.

    Args:
      pattern: of names.
      format: or its name.
      scale_rule: another rule, or its name.
      axis: as `FileRule` has it.
      scales: one of `SCALES`, or None for those of the rule.

    Raises:
      ValueError: unknown names, or a format whose scales cannot be searched.
    """
    if scales not in (None, *SCALES):
        raise ValueError(f"scales must be one of {', '.join(SCALES)}, got scales={scales!r}")
    if scales is not None:
        search_for(block_format(format).scale, "scales")
    return FileRule(Rule(pattern, weight_only(format, scale_rule)), axis, scales)


def _rule(row: Any, where: str) -> FileRule:
    if not isinstance(row, dict) or not isinstance(row.get("pattern"), str):
        raise ValueError(f"{where}: needs a pattern, a regular expression, got {row!r}")
    unknown = sorted(set(row) - _KEYS)
    deciding = [key for key in _DECIDING if key in row]
    axis = row.get("axis")
    if unknown or len(deciding) != 1 or row.get("skip", True) is not True:
        raise ValueError(
            f"{where}: needs exactly one of format, recipe and skip = true, and may have "
            f"scale_rule and scales (with format) and axis, got {', '.join(row)}"
        )
    if axis is not None and (not isinstance(axis, int) or isinstance(axis, bool)):
        raise ValueError(f"{where}: axis must be an integer, got axis={axis!r}")
    try:
        if "format" in row and row.get("scale_rule") and row.get("scales"):
            raise ValueError("scales chooses the scales; leave out scale_rule")
        if "format" in row:
            named = row.get("scale_rule"), axis, row.get("scales")
            return format_rule(row["pattern"], row["format"], *named)
        if "scale_rule" in row or "scales" in row:
            raise ValueError("scale_rule and scales go with format; a recipe has its own")
        recipe = None if "skip" in row else str(row["recipe"])
        return FileRule(Rule(row["pattern"], recipe), axis)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error
