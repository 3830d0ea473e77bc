"""Kinds that tests register, and models of other packages, left out unless `-m peers` asks."""

import pytest

from mx_jax import convert
from mx_jax.convert import kinds

from .helpers import TreeLinear


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "peers: models of other packages; docs/accuracy.md says how")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "peers" in config.getoption("markexpr"):
        return
    peers = [item for item in items if item.get_closest_marker("peers")]
    if peers:
        config.hook.pytest_deselected(items=peers)
        items[:] = [item for item in items if not item.get_closest_marker("peers")]


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
