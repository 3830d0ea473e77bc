"""The examples of integrations as modules, compiled fast: what they print is not what is tested."""

import functools
from collections.abc import Callable
from types import ModuleType

import pytest

from tests.examples.conftest import EXAMPLES, imported


@pytest.fixture
def integration() -> Callable[[str], ModuleType]:
    """Imports one of them by its name."""
    return functools.partial(imported, EXAMPLES / "integrations")
