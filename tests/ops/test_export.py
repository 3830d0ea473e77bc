"""Programs saved by jax.export: with open sizes, and in a process that has only imported mx_jax."""

import contextlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import recipes
from mx_jax.backends.cpu_ffi import library
from tests.needs import needs_library
from tests.processes import printed

W = jnp.asarray(np.random.default_rng(0).standard_normal((64, 8)), jnp.float32)


@pytest.fixture(autouse=True)
def as_on_one_device():
    """The library's calls are for one device, of which the tests simulate eight."""
    built = not isinstance(library.load(), str)
    with mx_jax.only_backend("cpu_ffi") if built else contextlib.nullcontext():
        yield


def exported(function: Any, *shape: Any) -> Any:
    """`function` of one float32 array, saved and read back."""
    allowed = [jax.export.DisabledSafetyCheck.custom_call(n) for n in mx_jax.export_targets()]
    spec = jax.ShapeDtypeStruct(shape, jnp.float32)
    program = jax.export.export(jax.jit(function), disabled_checks=allowed)(spec)
    return jax.export.deserialize(program.serialize())


def weight_only(x):
    packed = mx_jax.pack_weights(mx_jax.quantize(W, "mxfp4", axis=0))
    return mx_jax.matmul(x, packed, recipe=recipes.weight_only("mxfp4"))


FUNCTIONS = {
    "mxfp8": lambda x: mx_jax.matmul(x, W, recipe=recipes.mxfp8()),
    "weight_only": lambda x: mx_jax.matmul(x, W, recipe=recipes.weight_only("mxfp8_e4m3")),
    "packed": weight_only,
    "more_axes": lambda x: mx_jax.matmul(x[:, None], W, recipe=recipes.mxfp4()),
    "gradient": lambda x: jax.grad(
        lambda w: jnp.sum(mx_jax.matmul(x, w, recipe=recipes.mxfp8()) ** 2)
    )(W),
    "cast": lambda x: mx_jax.cast(x, "nvfp4"),
}


@pytest.mark.slow(but="mxfp8|packed|gradient")
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_symbolic_batch(function):
    (batch,) = jax.export.symbolic_shape("batch")
    program = exported(function, batch, 64)
    if "mx_jax_cpu_matmul" in mx_jax.export_targets():
        assert "mx_jax_cpu" in program.mlir_module()
    for rows in (1, 39):
        x = jnp.asarray(np.random.default_rng(rows).standard_normal((rows, 64)), jnp.float32)
        np.testing.assert_array_equal(program.call(x), jax.jit(function)(x))


LOADER = """
import pathlib, sys
import jax, jax.numpy as jnp
import mx_jax
program = jax.export.deserialize(bytearray(pathlib.Path(sys.argv[1]).read_bytes()))
print(float(program.call(jnp.ones((5, 64))).sum()))
"""


@pytest.mark.slow
@needs_library
def test_a_new_process_needs_the_import_alone(tmp_path: Path):
    (batch,) = jax.export.symbolic_shape("batch")
    program = exported(weight_only, batch, 64)
    file = tmp_path / "program"
    file.write_bytes(program.serialize())
    result = float(printed("-c", LOADER, file))
    assert result == float(weight_only(jnp.ones((5, 64))).sum())


@needs_library
def test_one_program_for_cpus_and_gpus():
    """Each platform's own way is lowered; only the CPU's has the library's calls."""
    allowed = [jax.export.DisabledSafetyCheck.custom_call(n) for n in mx_jax.export_targets()]
    x = jnp.asarray(np.random.default_rng(1).standard_normal((3, 64)), jnp.float32)
    function = jax.jit(FUNCTIONS["mxfp8"])
    with mx_jax.only_backend(None):
        program = jax.export.export(function, platforms=("cpu", "cuda"), disabled_checks=allowed)(x)
        alone = jax.export.export(function, platforms=("cuda",))(x)
        expected = function(x)
    saved = jax.export.deserialize(program.serialize())
    assert saved.platforms == ("cpu", "cuda")
    assert "mx_jax_cpu_matmul" in saved.mlir_module()
    assert "mx_jax_cpu" not in alone.mlir_module()
    np.testing.assert_array_equal(saved.call(x), expected)


def test_targets_are_those_of_the_library_that_programs_call():
    targets = mx_jax.export_targets()
    assert list(targets) == sorted(targets)
    assert {"mx_jax_cpu_matmul", "mx_jax_cpu_quantize", "mx_jax_cpu_matmul_packed"} <= {*targets}
    assert not any("peak" in name or "traffic" in name for name in targets)
