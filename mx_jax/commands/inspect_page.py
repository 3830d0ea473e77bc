"""The page that `inspect --html` writes: one file, nothing fetched, no script."""

import html
from collections.abc import Sequence

from mx_jax.commands.output import size
from mx_jax.commands.tensor_facts import TensorFacts
from mx_jax.inspect import report_page

_HEADS = (
    "tensor",
    "format",
    "shape",
    "size",
    "bits",
    "amax",
    "zeros %",
    "at limit %",
    "SQNR dB",
    "scales",
    "out of the ordinary",
)


def page(title: str, found: Sequence[TensorFacts]) -> str:
    """The page as text.

    Args:
      title: what was looked at.
      found: its tensors.
    """
    total = size(sum(facts.nbytes for facts in found))
    told = f"{len(found)} tensors, {total}. Scales: blocks by the power of two of their scale."
    rows = [_row(facts) for facts in found]
    return report_page.page(title, f"<p>{told}</p>\n{report_page.table(_HEADS, rows)}")


def _row(facts: TensorFacts) -> tuple[str, ...]:
    return (
        *map(html.escape, facts.texts("")),
        report_page.histogram(facts.scales) if facts.scales else "",
        report_page.bad("; ".join(facts.look.warnings)),
    )
