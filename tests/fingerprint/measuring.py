"""Records of programs: bits of results, bytes between devices, kernels."""

import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np

import mx_jax
from mx_jax.backends.cpu_ffi.library import Library
from mx_jax.testing.compare import bit_patterns
from tests.fingerprint.programs import PROGRAMS, Program
from tests.needs import LOADED
from tests.quick import OPTIONS, lowered
from tests.sharding.collectives import collectives

EXPECTED = Path(__file__).with_name("expected.json")

Record = dict[str, Any]

# Instruction sets for which the library has kernels of products: the same choices in each.
_ALIKE = ("avx512", "avx512_vnni", "avx512_bf16")
SAME_KERNELS = isinstance(LOADED, Library) and LOADED.isa in _ALIKE

OLD_JAX = jax.__version_info__ < (0, 11)

# XLA's own calls come and go with its versions.
_OURS = re.compile(r'custom_call_target="(mx_jax\w+)"')
_CALL = re.compile(r"custom_call @([\w.$]+)")
_PRODUCT = re.compile(r"dot_general.* : \(tensor<([\w?]+)>, tensor<([\w?]+)>\) -> tensor<([\w?]+)>")


def measure(name: str) -> Record:
    """Everything that is recorded of a program."""
    program = PROGRAMS[name]()
    with program.context():
        return _run(program) if program.runs else _lower(program)


def _run(program: Program) -> Record:
    jitted = jax.jit(program.run, out_shardings=program.results, compiler_options=OPTIONS)
    compiled = jitted.lower(*program.operands).compile()
    leaves = jax.tree.leaves(compiled(*program.operands))
    text = compiled.as_text()
    assert text is not None
    record = {
        "results": [
            _numbers(leaf) if index in program.rounded else _bits(leaf)
            for index, leaf in enumerate(leaves)
        ],
        "kernels": _counted(_OURS.findall(text)),
        "collectives": {f"{c.kind} {c.dtype}": c.nbytes for c in collectives(text)},
    }
    return {key: value for key, value in record.items() if value}


def _lower(program: Program) -> Record:
    """Backends, and calls and products of the lowered program, of a machine that is not there."""
    explained = mx_jax.inspect.explain(program.run, *program.operands)
    text = lowered(program.run, *program.operands, platform="cuda")
    products = [
        "{} x {} -> {}".format(*(shape.rpartition("x")[2] for shape in shapes))
        for shapes in _PRODUCT.findall(text)
    ]
    backends = [f"{row.kind}: {row.backend}" for row in explained.rows]
    return {"backends": _counted(backends), "lowered": _counted(_CALL.findall(text) + products)}


def _counted(names: list[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


def _bits(array: Any) -> str:
    """Type and a hash of the bits, in which both zeros are one, and all NaNs."""
    array = np.asarray(array)
    shape = f"{array.dtype.name}{list(array.shape)}"
    if array.dtype.kind not in "iub":
        array = np.where(array != array, np.nan, array.astype(np.float32) + 0).astype(np.float32)
    return f"{shape} {hashlib.sha256(bit_patterns(array).tobytes()).hexdigest()[:16]}"


def _numbers(array: Any) -> list[float]:
    """The sum of magnitudes, and some weighted sums of the values."""
    values = np.asarray(array, np.float64).ravel()
    weights = np.random.default_rng(0).standard_normal((4, values.size))
    return [float(f"{number:.6g}") for number in (np.abs(values).sum(), *weights @ values)]


def differences(expected: Record, actual: Record) -> list[str]:
    """In what a program is not as recorded, a line each; less may be exchanged than recorded.

    Without the library, and on older machines, other kernels run. Before JAX 0.11 some of them are
    merged, and some kernels for GPUs are not lowered: there kernels count by their names.
    """
    lines = []
    for index, (old, new) in enumerate(
        zip(expected.get("results", ()), actual.get("results", ()), strict=True)
    ):
        if not _alike(old, new):
            lines.append(f"result {index}: {new}, recorded {old}")
    kinds = [*["kernels"] * SAME_KERNELS, *["backends", "lowered"] * (not OLD_JAX)]
    for kind in kinds:
        old, new = expected.get(kind, {}), actual.get(kind, {})
        if old.keys() != new.keys() if OLD_JAX else old != new:
            lines.append(f"{kind}: {new}, recorded {old}")
    old, new = (record.get("collectives", {}) for record in (expected, actual))
    if sum(new.values()) > sum(old.values()):
        lines.append(f"bytes exchanged: {new}, recorded {old}")
    return lines


def _alike(old: Any, new: Any) -> bool:
    if isinstance(old, str) or isinstance(new, str):
        return old == new
    return bool(np.allclose(new, old, rtol=0, atol=1e-4 * old[0]))


def recorded() -> dict[str, Record]:
    return json.loads(EXPECTED.read_text())
