"""How commands print: to a terminal, through a pipe, and for people who wait."""

import sys

from rich.console import Console


class _Console(Console):
    """A console that leaves a closed pipe to `main`."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console() -> Console:
    """Where tables go."""
    # Through a pipe there is no terminal to fit, and a cut table would be of no use. Names of
    # tensors are printed, and a bracket in one is no markup.
    return _Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)


def say(text: str) -> None:
    """A line for people, past what another program reads."""
    print(f"mx_jax: {text}", file=sys.stderr)


def watched() -> bool:
    """Whether somebody sees a progress bar."""
    return sys.stderr.isatty()
