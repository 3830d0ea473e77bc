"""A bar for what takes long: bytes done of all, and the tensor at hand."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn


@contextlib.contextmanager
def progress_bar(verb: str, total: int, shown: bool) -> Iterator[Callable[[str, int], None]]:
    """Yields what is told a tensor's name and bytes; on stderr, or nowhere."""
    columns = (TextColumn("{task.description:<40}"), BarColumn(), DownloadColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not shown
    ) as bar:
        task = bar.add_task(verb, total=total)
        yield lambda name, done: bar.update(task, description=f"{verb} {name}", advance=done)
