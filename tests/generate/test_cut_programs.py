"""Compiled programs that JAX had not written to the end."""

from pathlib import Path

from mx_jax.generate.command import keep_programs
from tests.generate.test_command import programs

__all__ = ["programs"]  # a fixture, which restores JAX's configuration


def test_a_program_that_was_cut_short_goes(programs: Path):
    programs.mkdir(parents=True)
    for name in ("whole-cache", "whole-atime", "cut-cache"):
        (programs / name).write_text("x")
    keep_programs(programs)
    assert {path.name for path in programs.iterdir()} == {"whole-cache", "whole-atime"}
