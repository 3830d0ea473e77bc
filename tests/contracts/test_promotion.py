"""The library promotes no dtype and no rank silently, so users may forbid JAX to."""

import jax
import jax.numpy as jnp
import pytest

from tests.contracts.test_x64 import PROGRAMS


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def test_strictness_is_on():
    with pytest.raises(ValueError, match="dtype promotion"):
        _ = jnp.ones(2, jnp.bfloat16) + jnp.ones(2)
    with pytest.raises(ValueError, match="rank"):
        _ = jnp.ones((2, 2)) + jnp.ones(2)


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_promoted(name: str):
    """While it is traced, and while calls are lowered."""
    run, *operands = PROGRAMS[name]
    jax.jit(run).lower(*(jnp.asarray(x, jnp.bfloat16) for x in operands))
