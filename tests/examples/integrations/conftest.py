"""The examples of integrations as modules, compiled fast: what they print is not what is tested."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import jax
import pytest

INTEGRATIONS = Path(__file__).parents[3] / "examples" / "integrations"


@pytest.fixture
def integration() -> Iterator[Callable[[str], ModuleType]]:
    """Imports one of them by its name. XLA optimizes little meanwhile."""

    def load(name: str) -> ModuleType:
        if str(INTEGRATIONS) not in sys.path:
            sys.path.append(str(INTEGRATIONS))
        return importlib.import_module(name)

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield load
    jax.config.update("jax_disable_most_optimizations", before)
