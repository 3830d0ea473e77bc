"""Examples with prompts are highlighted as sessions: a copy leaves out prompts and output."""

import re


def on_page_markdown(markdown: str, **_: object) -> str:
    """What MkDocs calls with the text of each page."""
    return re.sub(r"^( *)```python\n(?=\1>>> )", r"\1```pycon\n", markdown, flags=re.MULTILINE)
