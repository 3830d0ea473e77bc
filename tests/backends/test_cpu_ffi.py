"""The compiled handlers of the CPU: loading, wrong calls, transformations, every instruction set.

Skipped where nothing was built; that they are bit for bit the reference's, the shared suite checks.
"""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mx_jax
from mx_jax.backends.cpu_ffi import CPU_FFI, casts, library
from mx_jax.backends.select import only_backend
from mx_jax.backends.target import Target
from mx_jax.formats import MXFP4, MXFP8_E4M3
from mx_jax.testing.cases import QuantizeCase
from mx_jax.testing.compare import assert_bitwise_equal
from tests.needs import needs_library

ROOT = Path(__file__).parents[2]
CPU = Target(platform="cpu")
LOADED = library.load()
CALL = QuantizeCase(format=MXFP8_E4M3, shape=(4, 64)).call
F32, U8, I32 = jnp.float32, jnp.uint8, jnp.int32


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *(code.split() if ".py " in code else ("-c", code))],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


# Loading ------------------------------------------------------------------------------------------


def test_an_installed_library_serves_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One that is shadowed by the checkout's own package."""
    monkeypatch.delenv(library.LIBRARY_VARIABLE, raising=False)
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    installed = tmp_path / "mx_jax" / "backends" / "cpu_ffi" / "native.abi3.so"
    installed.parent.mkdir(parents=True)
    installed.write_bytes(b"")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "elsewhere"), str(tmp_path)])
    assert library.find() == installed


@pytest.mark.parametrize(
    ("interface", "built", "runtime", "reason"),
    [
        (library.INTERFACE, (0, 3), (0, 5), None),
        (0, (0, 3), (0, 3), f"built from other sources (interface 0, not {library.INTERFACE})"),
        (library.INTERFACE, (0, 5), (0, 3), "built for XLA FFI 0.5, but this jaxlib has 0.3"),
        (library.INTERFACE, (1, 0), (0, 3), "built for XLA FFI 1.0, but this jaxlib has 0.3"),
        (library.INTERFACE, (0, 3), None, "jaxlib does not say which FFI version it has"),
    ],
)
def test_a_misfit_is_refused(interface, built, runtime, reason: str | None):
    assert str(reason) in str(library.misfit(interface, built, runtime))


def test_the_runtime_says_its_version():
    version = library.runtime_api_version()
    assert version is not None and version >= (0, 3)


REJECTS = """
from mx_jax.backends.target import Target
from mx_jax.backends.cpu_ffi import CPU_FFI
from mx_jax.testing.cases import QuantizeCase
from mx_jax.formats import MXFP4
call = QuantizeCase(format=MXFP4, shape=(4, 64)).call
print(CPU_FFI.rejects(call, Target(platform="cpu")))
"""


@pytest.mark.slow
def test_without_a_library_everything_works(tmp_path: Path):
    result = run_python(
        REJECTS + "import mx_jax; print(mx_jax.quantize([1.0], 'mxfp4').codes)",
        MX_JAX_CPU_LIBRARY="none",
    )
    assert result.stdout.splitlines() == ["left out: MX_JAX_CPU_LIBRARY=none", "[6]"]
    assert result.stderr == "", "asked for, it is nothing to warn of"
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    result = run_python(REJECTS, MX_JAX_CPU_LIBRARY=str(broken))
    assert result.stdout.startswith("cannot be loaded: "), result.stderr


@pytest.mark.slow
@needs_library
def test_an_unknown_instruction_set_is_a_reason():
    result = run_python(REJECTS, MX_JAX_CPU_ISA="mmx")
    assert result.stdout.startswith("MX_JAX_CPU_ISA=mmx is unknown or not on this machine, which")
    known = "known, each with those before it: portable, avx2, avx512, avx512_vnni, avx512_bf16"
    assert known in result.stdout


def test_several_devices_are_left_to_the_reference():
    reason = CPU_FFI.rejects(CALL, Target(platform="cpu", num_devices=8))
    assert reason is not None and reason.startswith("runs on one device: JAX cannot hand a custom")
    assert reason.endswith("got num_devices=8; only_backend('cpu_ffi') insists")


def test_other_platforms_are_rejected():
    reason = CPU_FFI.rejects(CALL, Target(platform="cuda"))
    assert reason == "runs on platform=cpu, got platform=cuda"


@needs_library
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(format=MXFP4, scale_rule="gaussian"), "computes no scales by the rule 'gaussian'"),
        (
            dict(format=mx_jax.formats.MXFP4_2D, shape=(64, 64, 2), axis=1),
            "takes two-dimensional blocks of the last two axes, got blocks=((-3, 32), (-2, 32))",
        ),
    ],
)
def test_reasons(options, reason: str):
    call = QuantizeCase(**({"shape": (64, 64)} | options)).call
    assert reason in str(CPU_FFI.rejects(call, CPU))


# Instruction sets ---------------------------------------------------------------------------------


ISAS = ("portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16")


@needs_library
@pytest.mark.slow
def test_every_instruction_set():
    """Random casts and products of every one that is here, forced in a process of its own."""
    assert isinstance(LOADED, library.Library)
    digests = set()
    for isa in ISAS[: ISAS.index(LOADED.detected_isa) + 1]:
        result = run_python("tests/backends/handlers_process.py 9", MX_JAX_CPU_ISA=isa)
        assert result.returncode == 0, result.stderr[-3000:]
        casts, digest = result.stdout.splitlines()
        assert casts.startswith(f"{isa}: "), result.stdout
        digests.add(digest)
    assert len(digests) == 1, digests


# Wrong calls --------------------------------------------------------------------------------------


def call_quantize(x, codes=None, scales=None, *rest, **changed):
    results = (
        codes or jax.ShapeDtypeStruct((4, 64), U8),
        scales or jax.ShapeDtypeStruct((4, 2), U8),
    )
    attributes = casts.quantize_attributes(CALL, False) | changed
    return jax.block_until_ready(jax.ffi.ffi_call(casts.QUANTIZE, results)(x, *rest, **attributes))


X = jnp.ones((4, 64), F32)
WRONG_CALLS = {
    "dtype": (dict(x=X.astype(I32)), "needs float32, bfloat16 or float16"),
    "codes": (
        dict(codes=jax.ShapeDtypeStruct((4, 63), U8)),
        r"codes must be uint8 of shape \(4, 64\)",
    ),
    "codes dtype": (dict(codes=jax.ShapeDtypeStruct((4, 64), I32)), "codes must be uint8"),
    "scales": (
        dict(scales=jax.ShapeDtypeStruct((4, 3), U8)),
        r"scales must be uint8 of shape \(4, 2\)",
    ),
    "scales dtype": (dict(scales=jax.ShapeDtypeStruct((4, 2), F32)), "scales must be uint8"),
    "axis": (dict(blocks=np.array([-3, 32])), "blocks need axes in -2..-1"),
    "pairs": (dict(blocks=np.array([-1])), "blocks must be pairs of axis and size"),
    "size": (dict(blocks=np.array([-1, -5])), "sizes >= 0"),
    "apart": (dict(blocks=np.array([-1, 0, -2, 0])), "neighbours, ascending"),
    "two": (dict(blocks=np.array([-2, 32, -1, 32])), r"scales must be uint8 of shape \(1, 2\)"),
    "two others": (
        dict(x=jnp.ones((4, 8, 2)), blocks=np.array([-3, 2, -2, 4])),
        "several blocked axes must be whole, or the last two, got 2 axes from axis=-3 on",
    ),
    "element": (dict(element=np.arange(8, dtype=np.int32)), "element must be the 8 facts"),
    "rounding": (dict(rounding="up"), "unknown rounding='up'"),
    "random bits": (dict(random_bits=np.int32(3)), "0 for others, got random_bits=3"),
    "rule": (dict(rule="best"), "unknown rule='best'"),
    "threshold": (dict(threshold=np.int32(0)), "needs 1 <= threshold"),
    "tensor scale": (dict(has_tensor_scale=True), "needs 1 operands after x"),
    "missing bits": (dict(rounding="stochastic", random_bits=np.int32(16)), "needs 1 operands"),
}


@needs_library
@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_quantize_calls(name: str):
    given, message = WRONG_CALLS[name]
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"mx_jax quantize: .*{message}"):
        call_quantize(**({"x": X} | given))


WRONG_BACK = {
    "codes": (dict(codes=(4, 63)), r"codes must be uint8 of shape \(4, 64\)"),
    "scales": (dict(scales=(4, 1)), r"scales must be uint8 of shape \(4, 2\)"),
    "dtype": (dict(dtype=I32), "needs float32, bfloat16 or float16"),
    "kind": (dict(kind="percent"), "unknown kind='percent'"),
    "element": (dict(element=np.zeros(3, np.int32)), "element must be the 8 facts"),
    "tensor scale": (dict(has_tensor_scale=True), "needs 1 operands after scales"),
}


@needs_library
@pytest.mark.parametrize("name", WRONG_BACK)
def test_wrong_dequantize_calls(name: str):
    given, message = WRONG_BACK[name]
    given = {"codes": (4, 64), "scales": (4, 2), "dtype": F32} | given
    codes, scales = jnp.zeros(given.pop("codes"), U8), jnp.zeros(given.pop("scales"), U8)
    result = jax.ShapeDtypeStruct((4, 64), given.pop("dtype"))
    attributes = casts.array_attributes(CALL.format, CALL.blocks)
    attributes |= {"has_tensor_scale": False} | given
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"mx_jax dequantize: .*{message}"):
        jax.block_until_ready(
            jax.ffi.ffi_call(casts.DEQUANTIZE, result)(codes, scales, **attributes)
        )


# Transformations ----------------------------------------------------------------------------------


def cast(x, axis=-1, name="mxfp8_e4m3"):
    q = mx_jax.quantize(x, name, axis=axis)
    return q.codes, q.scales, mx_jax.dequantize(q)


def check_same(actual, expected):
    for name, left, right in zip(("codes", "scales", "values"), actual, expected, strict=True):
        assert_bitwise_equal(left, right, what=name)


@pytest.mark.by_default("1-")
@needs_library
@pytest.mark.usefixtures("insist")
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "nvfp4"])
@pytest.mark.parametrize("in_axis", [0, 1])
def test_vmap_is_one_call(name: str, in_axis: int):
    x = jax.random.normal(jax.random.key(0), (3, 4, 64))
    many = jax.jit(jax.vmap(lambda x: cast(x, name=name), in_axes=in_axis))
    text = many.lower(x).as_text()
    assert text.count("@mx_jax_cpu_quantize") == 1 and "while" not in text
    with only_backend("reference"):
        expected = jax.vmap(lambda x: cast(x, name=name), in_axes=in_axis)(x)
    check_same(many(x), expected)


@needs_library
@pytest.mark.usefixtures("insist")
@pytest.mark.parametrize(
    "spec", [PartitionSpec("a", "b"), PartitionSpec(None, ("a", "b"))], ids=str
)
@pytest.mark.parametrize("axis", [0, 1])
def test_shards_are_not_gathered(spec: PartitionSpec, axis: int):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    x = jax.random.normal(jax.random.key(0), (128, 256))
    sharded = jax.device_put(x, NamedSharding(mesh, spec))
    run = jax.jit(lambda x: cast(x, axis))
    text = run.lower(sharded).compile().as_text()
    assert "mx_jax_cpu_quantize" in text and "all-gather" not in text
    actual = run(sharded)
    assert actual[0].sharding.is_equivalent_to(sharded.sharding, 2)
    with only_backend("reference"):
        check_same(actual, cast(x, axis))


@needs_library
@pytest.mark.usefixtures("insist")
def test_lowered_for_a_gpu_it_is_plain_jax():
    x = jnp.ones((4, 64))
    traced = jax.jit(cast).trace(x)
    assert "mx_jax_cpu" not in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mx_jax_cpu_quantize" in traced.lower(lowering_platforms=("cpu",)).as_text()


@needs_library
@pytest.mark.usefixtures("insist")
def test_threads_share_nothing():
    from concurrent.futures import ThreadPoolExecutor

    arrays = [jax.random.normal(jax.random.key(seed), (64, 512)) for seed in range(8)]
    jitted = jax.jit(cast)

    def run(x):
        with only_backend("cpu_ffi"):  # contexts belong to one thread
            return jitted(x)

    expected = [run(x) for x in arrays]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            for actual, wanted in zip(pool.map(run, arrays), expected, strict=True):
                check_same(actual, wanted)
