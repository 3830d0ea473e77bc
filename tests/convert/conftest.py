"""The marker `peers`: models that other packages ship, left out unless asked for by `-m peers`."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "peers: models of other packages; docs/convert.md says how")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "peers" in config.getoption("markexpr"):
        return
    peers = [item for item in items if item.get_closest_marker("peers")]
    if peers:
        config.hook.pytest_deselected(items=peers)
        items[:] = [item for item in items if not item.get_closest_marker("peers")]
