"""Kinds that tests register."""

import pytest

from mx_jax.convert import kinds


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(kinds, "_KINDS", [*kinds._KINDS])
