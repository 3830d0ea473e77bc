"""The examples of integrations as modules, compiled fast: what they print is not what is tested."""

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax
import pytest

from tests.examples.conftest import EXAMPLES, imported
from tests.nn.layers import weighted_sum
from tests.quick import quick


@pytest.fixture
def integration() -> Iterator[Callable[[str], ModuleType]]:
    """Imports one of them by its name. XLA optimizes little meanwhile."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield functools.partial(imported, EXAMPLES / "integrations")
    jax.config.update("jax_disable_most_optimizations", before)


def assert_learned(losses: list[float], start: float = 1.0) -> None:
    assert losses[0] > start and losses[-1] < 0.5 * losses[0], losses


def value_and_gradients(run: Callable[[Any, Any], Any], w: Any, x: Any) -> Any:
    """Gradients by w and x of `weighted_sum`, and what it is the sum of."""

    def loss(w: Any, x: Any) -> Any:
        y = run(w, x)
        return weighted_sum(y), y

    return quick(jax.grad(loss, argnums=(0, 1), has_aux=True))(w, x)
