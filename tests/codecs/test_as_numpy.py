"""What NumPy gets of codes: values, and a warning where it writes them to a file."""

import io
import types
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.flax

import mx_jax

X = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
WRITES = {
    "savez": lambda x, file: np.savez(file, x=x, y=x),
    "savez_compressed": lambda x, file: np.savez_compressed(file, x),
    "save": lambda x, file: np.save(file, x),
    "savetxt": lambda x, file: np.savetxt(file, x),
    "jnp": lambda x, file: jnp.save(file, x),
    "safetensors": lambda x, file: safetensors.flax.save({"x": x, "y": x}),
}


@pytest.fixture
def kernel():
    return mx_jax.quantize(X, "mxfp4")


@pytest.mark.parametrize("name", WRITES)
def test_writers_warn_once_for_a_line(name, kernel):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(2):
            WRITES[name](kernel, io.BytesIO())
    (warning,) = found
    assert "mx_jax.checkpoint.save keeps the codes, to_wire" in str(warning.message)
    assert warning.filename == __file__


def test_packed_weights_warn_too():
    packed = mx_jax.pack_weights(mx_jax.quantize(X.T, "mxfp4", axis=0))
    with pytest.warns(UserWarning, match=f"^{type(packed).__name__}: its values are written"):
        np.save(io.BytesIO(), packed)


def asked_by(module):
    """A function of a module of that name that makes a NumPy array."""
    made = types.ModuleType(module)
    exec("import numpy\ndef read(x): return numpy.asarray(x)", made.__dict__)
    return made.read


def test_a_package_stands_for_what_is_in_it(kernel):
    with pytest.warns(UserWarning, match="its values are written"):
        asked_by("h5py._hl.dataset")(kernel)


def test_whoever_reads_values_is_not_warned(kernel):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = np.asarray(kernel)
        np.testing.assert_array_equal(values, kernel)
        assert np.asarray(kernel, np.float64).dtype == np.float64
        np.savez(io.BytesIO(), np.asarray(kernel.codes), kernel.dequantize())
        # A package of another name, however it begins.
        np.testing.assert_array_equal(asked_by("h5pyish")(kernel), values)
