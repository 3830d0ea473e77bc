"""What docs/integrations.md says to copy is what the examples run."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "integrations.md"


def definitions(source: str) -> dict[str, str]:
    """Classes and functions at the left margin by name, up to the next statement there."""
    found = re.findall(
        r"^((?:@.*\n)*(?:class|def) (\w+).*\n(?:(?: +.*)?\n)*)", source + "\n", re.MULTILINE
    )
    return {name: text.strip() for text, name in found}


@pytest.mark.one_python(reason="compares the text of a page with that of the examples")
@pytest.mark.parametrize(
    "example", ["qwix_provider", "maxtext_quantization", "haliax_linear", "levanter_trainer"]
)
def test_lines_to_copy_are_the_examples(example: str):
    code = (ROOT / "examples" / "integrations" / f"{example}.py").read_text()
    blocks = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    shown = {name: text for block in blocks for name, text in definitions(block).items()}
    own = definitions(code)
    assert shown.keys() & own.keys(), "the page shows nothing of the example"
    for name in shown.keys() & own.keys():
        assert shown[name] == own[name]
