"""Backends made of others, for tests."""

import dataclasses
from collections.abc import Callable
from typing import Any

from mx_jax.backends.calls import Call
from mx_jax.backends.target import Backend


def altered(backend: Backend, call: type[Call], run: Callable[..., Any]) -> Backend:
    """A backend that computes one kind of call in another way."""
    assert any(offer.call is call for offer in backend.table), call
    table = tuple(
        dataclasses.replace(offer, run=run) if offer.call is call else offer
        for offer in backend.table
    )
    return dataclasses.replace(backend, table=table)


def answering(backend: Backend, rejects: Callable[..., Any], **changes: Any) -> Backend:
    """A backend that takes what `rejects` says of what it offers."""
    table = tuple(dataclasses.replace(offer, rejects=rejects) for offer in backend.table)
    return dataclasses.replace(backend, table=table, **changes)
