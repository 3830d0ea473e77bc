"""Outside jit too, an operation is one program: primitive by primitive, compiling takes seconds."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import pytest

import mx_jax

FORMATS = ("mxfp8_e4m3", "nvfp4", "mxint8", "float8_rowwise_e4m3")


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """What is compiled from here on."""
    events: list[str] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.by_default("mxfp8|function-nvfp4|method-mxint8|array-float8")
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("rows", "operation"),
    [
        (11, lambda x: x.dequantize()),
        (12, lambda x: x.dequantize(jnp.bfloat16)),
        (13, mx_jax.dequantize),
        (14, lambda x: jnp.asarray(x)),
    ],
    ids=["method", "bfloat16", "function", "as an array"],
)
def test_values(rows: int, operation: Callable[[Any], Any], format: str, compiled: list[str]):
    x = mx_jax.quantize(jnp.ones((rows, 7, 96)), format)  # a shape that no other test has
    compiled.clear()
    operation(x)
    assert 1 <= len(compiled) <= 2


@pytest.mark.parametrize("format", FORMATS)
def test_quantize(format: str, compiled: list[str]):
    x = jnp.ones((15, 7, 96))
    compiled.clear()
    mx_jax.quantize(x, format)
    assert len(compiled) == 1
