"""Write tables and drawings of docs/ from committed results: `python -m benchmarks.page`.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. What is around it is written by
hand, and stays.
"""

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import page_pictures, page_tables

DOCS = Path(__file__).parents[1] / "docs"
PAGES = (DOCS / "benchmarks.md", DOCS / "accuracy.md")
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["".join(f" {cell} |" if cell else " |" for cell in line) for line in (heads, *rows)]
    return "\n".join(f"|{line}" for line in (lines[0], "---|" * len(heads), *lines[1:])) + "\n"


def written(text: str) -> str:
    """A page with its tables as the results have them; Markdown wants empty lines around them.

    Raises:
      KeyError: a table that there is not.
    """
    return _TABLE.sub(
        lambda match: f"{match[1]}\n{_markdown(*page_tables.TABLES[match[2]]())}\n{match[3]}", text
    )


def main() -> None:
    """Run the command."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0]).parse_args()
    for page in PAGES:
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(page)
    page_pictures.draw()


if __name__ == "__main__":
    main()
