"""Evidence: what a row stands for, and that it switches on exactly that."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import formats, recipes
from mx_jax.axes import Axes
from mx_jax.backends import evidence
from mx_jax.backends.calls import Call, MatmulCall, OperandType, PackCall, RaggedCall
from mx_jax.backends.cudnn import CUDNN
from mx_jax.backends.evidence import ROWS, Row, Work, source_of
from mx_jax.backends.pallas_gpu import PALLAS_GPU
from mx_jax.backends.pallas_gpu.architecture import MMA, WGMMA
from mx_jax.backends.reference import REFERENCE
from mx_jax.backends.select import (
    BACKENDS,
    Choice,
    current_target,
    on_request,
    recording,
    select,
)
from mx_jax.backends.target import Target
from mx_jax.measure.cases import Case
from mx_jax.testing.cases import MatmulCase, QuantizeCase
from tests.backends.altered import altered
from tests.backends.mosaic import with_any_jax

KIND = "NVIDIA H200"
H200 = Target(platform="cuda", compute_capability=(9, 0), device_kind=KIND)
# What takes the case where nothing was measured, by the version of JAX.
UNMEASURED = ("xla_scaled", "xla_bfloat16")
CASE = MatmulCase(
    lhs=None,
    rhs=formats.MXFP4,
    m=(16,),
    n=(4096,),
    k=(4096,),
    dtype="bfloat16",
    out_dtype="bfloat16",
)


@pytest.fixture(autouse=True)
def any_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    with_any_jax(monkeypatch)


def case_of(**changes: Any) -> MatmulCall:
    return dataclasses.replace(CASE, **changes).call


def packed(call: MatmulCall, by: str = "pallas_gpu") -> MatmulCall:
    return dataclasses.replace(call, rhs=dataclasses.replace(call.rhs, packed_by=by))


def row_of(call: Call, **changes: Any) -> Row:
    work = Work.of(call, "pallas_gpu")
    assert work is not None
    facts: dict[str, Any] = dict(
        backend="pallas_gpu",
        kernel="wgmma",
        work=work,
        shape=(16, 4096, 4096),
        device_kind=KIND,
        jax=jax.__version__,
        source=source_of(PALLAS_GPU),
        error=0.1,
        over_plain=2.1,
        over_bfloat16=2.5,
        date="2026-11-20",
    )
    return Row(**facts | changes)


def chosen(call: Call, *rows: Row, target: Target = H200) -> Choice:
    with evidence.use(rows):
        return select(call, target)


def test_a_row_switches_a_kernel_on():
    row = row_of(CASE.call)
    choice = chosen(CASE.call, row)
    assert choice.backend == PALLAS_GPU
    assert choice.evidence == row
    assert choice.rejections == ()
    without = chosen(CASE.call)
    assert without.backend.name in UNMEASURED and without.evidence is None


OTHER_CALLS = {
    "more rows": case_of(m=(17,)),
    "fewer rows": case_of(m=(8,)),
    "a larger class": case_of(n=(4097,)),
    "a smaller class": case_of(n=(1024,)),
    "another format": case_of(rhs=formats.MXFP8_E4M3),
    "the same name, other facts": case_of(
        rhs=dataclasses.replace(formats.MXFP4, block=(1, 16)),
    ),
    "two quantized operands": case_of(lhs=formats.MXFP4),
    "another dtype": case_of(dtype="float16"),
    "another result": case_of(out_dtype="float32"),
    "a batch": case_of(batch=(2,)),
    "packed": packed(CASE.call),
}


@pytest.mark.parametrize("call", OTHER_CALLS.values(), ids=OTHER_CALLS)
def test_a_row_says_nothing_of_other_calls(call: MatmulCall):
    assert PALLAS_GPU.rejects(call, H200) is None
    assert chosen(call, row_of(CASE.call)).backend != PALLAS_GPU


def test_calls_of_the_same_bucket_and_class():
    row = row_of(CASE.call)
    for changes in (dict(m=(9,)), dict(m=(3, 5)), dict(n=(2880,), k=(2880,)), dict(n=(1025,))):
        assert chosen(case_of(**changes), row).backend == PALLAS_GPU
    # Packed by somebody else is not packed for this kernel.
    assert chosen(packed(CASE.call, by="cpu_ffi"), row).backend == PALLAS_GPU


@pytest.mark.parametrize(
    "changes",
    [
        dict(device_kind="NVIDIA B200"),
        dict(jax="0.0.1"),
        dict(source="0" * 16),
        dict(error=1.5),
        dict(error=math.nan),
        dict(error=None, failed="no answer after 120 s", over_plain=None),
        dict(over_plain=1.0),
        dict(over_plain=None),
        dict(backend="cudnn"),
    ],
    ids=str,
)
def test_rows_that_switch_nothing_on(changes: dict[str, Any]):
    assert chosen(CASE.call, row_of(CASE.call, **changes)).backend.name in UNMEASURED


@pytest.mark.parametrize(
    "target",
    [
        dataclasses.replace(H200, num_devices=8),
        dataclasses.replace(H200, device_kind=None),
        dataclasses.replace(H200, device_kind="NVIDIA B200"),
        Target(platform="tpu", device_kind=KIND),
    ],
    ids=str,
)
def test_other_machines(target: Target):
    assert chosen(CASE.call, row_of(CASE.call), target=target).backend.name in UNMEASURED


def test_the_same_processors_and_another_fault_release_of_jax():
    row = row_of(CASE.call, jax=".".join([*jax.__version__.split(".")[:2], "99"]))
    for kind in (KIND, "NVIDIA H100 80GB HBM3"):
        target = dataclasses.replace(H200, device_kind=kind)
        assert chosen(CASE.call, row, target=target).evidence == row
    assert chosen(CASE.call, row_of(CASE.call, device_kind="NVIDIA H100 PCIe")).evidence is None


@pytest.mark.parametrize(("rows", "nearest"), [(1, 1), (2, 16), (64, 16), (4096, 16)])
def test_packed_weights_meet_any_number_of_rows(rows: int, nearest: int):
    """To unpack them would take longer: the nearest number of rows that was measured decides."""
    fast, slow = dict(over_unpacking=3.0), dict(over_unpacking=0.5)
    calls = {m: packed(case_of(m=(m,))) for m in (1, 16)}
    measured = {m: row_of(call, **fast if m == nearest else slow) for m, call in calls.items()}
    assert chosen(packed(case_of(m=(rows,))), *measured.values()).evidence == measured[nearest]


def test_other_weights_wait_for_a_row_of_their_number_of_rows():
    assert chosen(case_of(m=(64,)), row_of(CASE.call)).evidence is None


def test_of_several_shapes_the_worst_decides():
    good, slow = row_of(CASE.call), row_of(CASE.call, shape=(16, 2880, 2880), over_plain=0.9)
    wrong = row_of(CASE.call, shape=(16, 4096, 2048), error=7.0, over_plain=9.0)
    for rows in ((good, slow), (slow, good), (good, wrong), (wrong, slow, good)):
        assert chosen(CASE.call, *rows).backend != PALLAS_GPU
    assert chosen(CASE.call, good, dataclasses.replace(slow, over_plain=1.1)).backend == PALLAS_GPU


def test_the_fastest_of_several_backends():
    call = MatmulCase(
        lhs=formats.MXFP8_E4M3, rhs=formats.MXFP8_E4M3, m=(64,), n=(1024,), k=(1024,)
    ).call
    b200 = dataclasses.replace(H200, compute_capability=(10, 0))
    ours = row_of(call)
    theirs = dataclasses.replace(ours, backend="cudnn", source=source_of(CUDNN), over_plain=3.0)
    assert chosen(call, ours, theirs, target=b200).backend == CUDNN
    assert chosen(call, ours, dataclasses.replace(theirs, over_plain=2.0), target=b200).backend == (
        PALLAS_GPU
    )


def test_names_go_before_evidence():
    with mx_jax.prefer_backends("reference"):
        choice = chosen(CASE.call, row_of(CASE.call))
        assert choice.backend.name == "reference" and choice.evidence is None
    with mx_jax.only_backend("reference"):
        assert chosen(CASE.call, row_of(CASE.call)).backend.name == "reference"
    for named in (mx_jax.prefer_backends, mx_jax.only_backend):
        with named("pallas_gpu"):
            choice = chosen(CASE.call, row_of(CASE.call, over_plain=0.5))
            assert choice.backend == PALLAS_GPU and choice.evidence is None


def test_of_casts_there_are_no_rows():
    """Faster alone, a kernel makes a step slower; who asks is told so."""
    case = QuantizeCase(format=formats.MXFP4, shape=(64, 64), dtype="bfloat16")
    assert Work.of(case.call, "pallas_gpu") is None
    assert ("pallas_gpu", "faster alone, but not in a step, as an H200 was measured") in on_request(
        case.call, H200
    )


def test_products_of_rows_in_groups(monkeypatch: pytest.MonkeyPatch):
    """A kernel for another kind of call needs an offer and a row."""
    planted = dataclasses.replace(REFERENCE, name="planted", source=lambda: (Path(__file__),))
    case = Case(
        backend="planted",
        kind="ragged product",
        formats=(None, "mxfp4"),
        shape=(64, 128, 64),
        groups=8,
    )
    assert isinstance(case.call, RaggedCall)
    row = row_of(case.call, backend="planted", source=source_of(planted))
    monkeypatch.setattr("mx_jax.backends.select.BACKENDS", (*BACKENDS, planted))
    assert (row.work.rows, row.work.groups) == (8, 8)

    def taken(call: Call, target: Target = H200) -> str:
        return chosen(call, row, target=target).backend.name

    def other(**changes: Any) -> Call:
        return dataclasses.replace(case, **changes).call

    assert taken(case.call) == taken(other(shape=(56, 100, 64), groups=7)) == "planted"
    several = dataclasses.replace(H200, num_devices=8)
    assert taken(case.call, several) != "planted"
    for changes in (
        dict(shape=(65, 128, 64)),  # more rows of a group
        dict(groups=9, shape=(72, 128, 64)),
        dict(formats=("mxfp4", "mxfp4")),
        dict(dtype="float16"),
    ):
        assert taken(other(**changes)) != "planted", changes
    sums = dataclasses.replace(
        case.call,
        lhs=OperandType(shape=(64, 32), axes=Axes.ordered(k_first=True), dtype=np.dtype("float32")),
        rhs=OperandType(shape=(64, 16), axes=Axes.ordered(k_first=True), format=formats.MXFP4),
    )
    work = Work.of(sums, "planted")
    assert work is not None and work.kind == "ragged sums"


def test_packing():
    """Weights are packed if that is faster for any number of rows than not packing."""
    call = packed(CASE.call)
    few = row_of(call, over_plain=2.0, over_unpacking=5.0)
    many = row_of(packed(case_of(m=(4096,))), over_plain=0.9, over_unpacking=2.0)
    slow = dataclasses.replace(few, shape=(16, 2880, 2880), over_unpacking=0.8)
    pack = PackCall(weights=CASE.call.rhs, blocks=((-1, 32),))
    assert chosen(pack, few, many).backend == PALLAS_GPU
    assert chosen(pack, many, few).evidence == few
    for rows in (
        [many],
        [row_of(CASE.call)],
        [dataclasses.replace(few, error=2.0)],
        # No product would be given to the kernel: another size of its kind is slower.
        [few, slow],
    ):
        assert chosen(pack, *rows).backend != PALLAS_GPU
    quantized = dataclasses.replace(pack, lhs_format=formats.MXFP8_E4M3)
    larger = dataclasses.replace(pack, weights=case_of(n=(8192,)).rhs)
    of_float32 = dataclasses.replace(pack, dtype=np.dtype("float32"))
    of_bfloat16 = dataclasses.replace(pack, dtype=np.dtype("bfloat16"))
    assert chosen(of_bfloat16, few).backend == PALLAS_GPU
    for other in (quantized, larger, of_float32):
        assert chosen(other, few).backend != PALLAS_GPU


def test_packed_products_are_compared_with_unpacking():
    call = packed(CASE.call)
    row = row_of(call, over_plain=0.9, over_unpacking=1.8)
    assert chosen(call, row).backend == PALLAS_GPU
    assert str(row).endswith(
        "0.9 times the plain path's speed (1.8 where that unpacks weights first)"
    )
    assert chosen(call, dataclasses.replace(row, over_unpacking=0.99)).backend != PALLAS_GPU


def test_packed_weights_are_seen():
    w = mx_jax.quantize(jnp.ones((64, 32)), "mxfp4", axis=0)
    with mx_jax.testing.target("cpu"), recording() as recorder:
        product = mx_jax.pack_weights(w)
        jax.eval_shape(
            lambda x: mx_jax.matmul(x, product, recipe=recipes.weight_only("mxfp4")),
            jnp.ones((2, 64)),
        )
    (call,) = [s.call for s in recorder.selections if isinstance(s.call, MatmulCall)]
    assert call.rhs.packed_by == getattr(product, "backend", None)
    assert OperandType.of(w, call.rhs.axes).packed_by is None


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products by `pallas_gpu` are ones, for versions of JAX that lack Mosaic."""

    def ones(lhs, rhs, call):
        return jnp.ones((call.lhs.rows, call.rhs.rows), call.out_dtype)

    fake = altered(PALLAS_GPU, MatmulCall, ones)
    table = tuple(fake if backend == PALLAS_GPU else backend for backend in BACKENDS)
    monkeypatch.setattr("mx_jax.backends.select.BACKENDS", table)


@pytest.mark.usefixtures("no_kernel")
def test_explain_quotes_the_row():
    def explained(*rows: Row) -> list[str]:
        with evidence.use(rows):
            text = mx_jax.inspect.explain(
                recipes.weight_only("mxfp4"), 16, 4096, 4096, dtype="bfloat16", target=H200
            )
        return text.partition("grad_input")[0].splitlines()

    measured = explained(row_of(CASE.call))
    assert measured[0].endswith("-> pallas_gpu")
    assert measured[1:] == [
        "  pallas_gpu: measured on NVIDIA H200, 2026-11-20: 2.1 times the plain path's speed"
    ]
    waits = "  pallas_gpu takes it if named, by prefer_backends('pallas_gpu'): "
    nothing = f"not proved on hardware: nothing was measured of this on {KIND}; "
    assert waits + nothing + "`python -m mx_jax gpu` measures it" in explained()
    assert waits + (
        "measured on NVIDIA H200, 2026-11-20: 0.8 times the plain path's speed"
    ) in explained(row_of(CASE.call, over_plain=0.8))
    assert waits + (
        "measured on NVIDIA H200, 2026-11-20: wrong, with 37 times the error that is allowed"
    ) in explained(row_of(CASE.call, error=37.0))
    assert waits + (
        "measured on NVIDIA H200, 2026-11-20: failed: no answer after 120 s"
    ) in explained(row_of(CASE.call, error=None, over_plain=None, failed="no answer after 120 s"))


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.filterwarnings("ignore:matmul. weights are laid out for backend pallas_gpu")
def test_rows_are_part_of_jits_key():
    traces = []

    @jax.jit
    def product(x, w):
        traces.append(x)
        return mx_jax.matmul(x, w, recipe=recipes.weight_only("mxfp4"))

    x = jnp.zeros((16, 64), jnp.bfloat16)
    w = mx_jax.quantize(jnp.zeros((64, 32), jnp.bfloat16), "mxfp4", axis=0)
    small = MatmulCase(
        lhs=None, rhs=formats.MXFP4, m=(16,), n=(32,), k=(64,), dtype="bfloat16"
    ).call
    small = dataclasses.replace(small, out_dtype=jnp.dtype("bfloat16"))
    target = mx_jax.testing.target("cuda", (9, 0), device_kind=KIND)
    with target:
        zeros = product(x, w)
        with evidence.use([row_of(small)]):
            ones = product(x, w)
            product(x, w)
        with evidence.use([]):
            product(x, w)
    assert np.all(np.asarray(zeros, np.float32) == 0) and np.all(np.asarray(ones, np.float32) == 1)
    assert len(traces) == 3


@pytest.mark.usefixtures("no_kernel")
def test_the_rows_that_a_program_used():
    used, unused = row_of(CASE.call), row_of(case_of(m=(64,)))
    x = jax.ShapeDtypeStruct((16, 4096), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    product = jax.jit(lambda x, w: mx_jax.matmul(x, w, recipe=recipes.weight_only("mxfp4")))

    def twice(x, w):
        return product(x, w), product(x, w)

    def found(*rows: Row) -> tuple[Row, ...]:
        with evidence.use(rows):
            return mx_jax.inspect.evidence_of(twice, x, w)

    with mx_jax.testing.target("cuda", (9, 0), device_kind=KIND):
        assert found(unused, used) == (used,)
        assert found(unused) == ()
        with evidence.use([used]), mx_jax.only_backend("reference"):
            assert mx_jax.inspect.evidence_of(twice, x, w) == ()


def test_without_rows_nothing_is_traced():
    with evidence.use(()):
        assert mx_jax.inspect.evidence_of(lambda: pytest.fail("traced")) == ()


def test_use_takes_rows_alone():
    with pytest.raises(
        TypeError, match=r"evidence.use: needs rows of type Row, got row='pallas_gpu'"
    ):
        evidence.use(["pallas_gpu"])  # pyright: ignore[reportArgumentType]


def test_cpus_have_no_kind():
    assert current_target().device_kind is None


@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_buckets_end_where_they_say(rows: float):
    work = Work.of(CASE.call, "pallas_gpu")
    assert work is not None
    lowest = dataclasses.replace(work, rows=rows).lowest_rows
    for m in (lowest, lowest if math.isinf(rows) else int(rows)):
        found = Work.of(case_of(m=(m,)), "pallas_gpu")
        assert found is not None and found.rows == rows
    if lowest > 1:
        below = Work.of(case_of(m=(lowest - 1,)), "pallas_gpu")
        assert below is not None and below.rows < rows


def test_a_bucket_has_one_entry_of_the_table():
    """So what is checked at both of its ends is checked of all tiles that it may take."""
    for kernel in (MMA, WGMMA):
        for table in kernel.tiles.values():
            changes = [limit for limit, _ in table] + [kernel.crossover - 1]
            for below, most in itertools.pairwise((0, *ROWS)):
                assert not any(below < at < most for at in changes), (kernel, most)
