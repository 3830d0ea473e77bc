"""Kinds that tests register."""

import pytest

from mx_jax import convert
from mx_jax.convert import kinds

from .helpers import TreeLinear


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(kinds, "_KINDS", [*kinds._KINDS])


@pytest.fixture
def registered_linear(unregistered: None) -> None:
    """The layer of trees, as its author registers it."""
    convert.register(
        convert.Kind(
            tree=TreeLinear,
            shape=lambda layer, kernel: kernel[::-1],
            kernel=lambda layer: layer.weight,
        )
    )
