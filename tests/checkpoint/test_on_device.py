"""Arrays of files on their way to a device."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from mx_jax import checkpoint
from mx_jax.checkpoint.weights import on_device

ARRAYS = (
    np.arange(5),
    np.full((2, 3), 3.5),
    np.ones((0, 5), np.float32),
    np.array(2.0, np.float32),
    np.arange(24, dtype=np.float32).reshape(4, 6)[:, ::2],
    np.array([True, False]),
    np.arange(9).astype(ml_dtypes.bfloat16),
    np.frombuffer(b"\x00" * 3 + b"\x01\x02\x03\x04", np.uint8)[3:],
)


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{list(array.shape)}")
def test_as_jnp_has_it(array: np.ndarray):
    found, expected = on_device(array), jnp.asarray(array)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert (found.weak_type, found.committed) == (expected.weak_type, expected.committed)
    np.testing.assert_array_equal(found, expected)


def test_what_lies_there_already_stays():
    array = jnp.ones(3)
    assert on_device(array) is array
    assert jax.jit(on_device)(array).shape == (3,)


def test_a_file_may_change_afterwards(tmp_path: Path):
    """What was read is a copy: neither the file nor the caller's array is looked at again."""
    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file({"x": np.arange(64, dtype=np.float32)}, path)
    found = checkpoint.read(path)["x"]
    with path.open("r+b") as file:
        file.seek(-256, 2)
        file.write(bytes(256))
    np.testing.assert_array_equal(found, np.arange(64, dtype=np.float32))
    given = np.ones(64, np.float32)
    held = on_device(given)
    given[:] = 2
    assert bool((held == 1).all())


def test_it_is_copied_once(monkeypatch: pytest.MonkeyPatch):
    """XLA takes the memory over; what is not aligned as its own would be copied again."""
    if jax.default_backend() != "cpu":
        pytest.skip("a device with memory of its own")
    handed: list[np.ndarray] = []
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x: handed.append(x) or put(x))
    for _ in range(8):
        found = on_device(np.ones((65, 63), np.float32)[1:])
        assert found.unsafe_buffer_pointer() == handed[-1].ctypes.data
