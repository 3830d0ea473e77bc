"""The examples of integrations as modules, compiled fast: what they print is not what is tested."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest

from tests.nn.layers import weighted_sum
from tests.quick import quick

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


def assert_learned(losses: list[float], start: float = 1.0) -> None:
    assert losses[0] > start and losses[-1] < 0.5 * losses[0], losses


def value_and_gradients(run: Callable[[Any, Any], Any], w: Any, x: Any) -> Any:
    """Gradients by w and x of `weighted_sum`, and what it is the sum of."""

    def loss(w: Any, x: Any) -> Any:
        y = run(w, x)
        return weighted_sum(y), y

    return quick(jax.grad(loss, argnums=(0, 1), has_aux=True))(w, x)
