"""The examples as modules: they are scripts, found beside each other and not installed."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def example() -> Callable[[str], ModuleType]:
    """Imports an example, or a part of one, by its module name."""

    def load(name: str) -> ModuleType:
        if str(EXAMPLES) not in sys.path:
            sys.path.append(str(EXAMPLES))
        return importlib.import_module(name)

    return load
