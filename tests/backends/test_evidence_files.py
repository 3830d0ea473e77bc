"""Rows as JSON, and which files of them count: none may break a user's program."""

import dataclasses
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mx_jax.backends import evidence
from mx_jax.backends.evidence import SCHEMA, Row, Work, in_force, merged, read, write
from mx_jax.backends.pallas_gpu import PALLAS_GPU
from mx_jax.formats import BLOCK_FORMATS, MXFP4
from tests.extending.fp5 import MXFP5

BF16 = np.dtype("bfloat16")
ROW = Row(
    backend="pallas_gpu",
    kernel="wgmma",
    work=Work(kind="product", formats=(None, MXFP4), dtypes=(BF16, None, BF16), rows=16),
    shape=(16, 8192, 8192),
    device_kind="NVIDIA H200",
    jax="0.12.0",
    source="0123456789abcdef",
    error=0.25,
    over_plain=2.0,
    over_bfloat16=2.5,
    driver="580.95.05",
    versions=(("jaxlib", "0.12.0"),),
    date="2026-11-20",
)
SUMS = Work(kind="ragged sums", formats=(MXFP4, MXFP4), dtypes=(None, None, BF16), size=4, groups=8)
FAILED = dataclasses.replace(
    ROW, shape=(1, 2, 3), error=None, over_plain=None, failed="it hangs?", driver=None
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's cache of rows that does not exist yet, and nothing read before."""
    path = tmp_path / "cache" / "evidence.json"
    monkeypatch.setattr(evidence, "cache_path", lambda: path)
    monkeypatch.setattr(evidence, "driver", lambda: ROW.driver)
    monkeypatch.delenv(evidence.VARIABLE, raising=False)
    evidence.loaded.cache_clear()
    yield path
    evidence.loaded.cache_clear()


def test_a_file_gives_the_same_rows(tmp_path: Path):
    own = tuple(
        dataclasses.replace(
            ROW,
            work=dataclasses.replace(SUMS, formats=(format, MXFP5)),
            shape=(place, 2),
        )
        for place, format in enumerate((*BLOCK_FORMATS, MXFP5))
    )
    path = tmp_path / "new" / "rows.json"
    write(path, (ROW, FAILED, *own))
    assert read(path) == (ROW, FAILED, *own)
    assert math.isinf(read(path)[0].work.size)
    assert [found.name for found in path.parent.iterdir()] == ["rows.json"]


def test_formats_are_facts(tmp_path: Path):
    """A row of what had this name once says nothing of what has it now."""
    path = tmp_path / "rows.json"
    write(path, [ROW])
    facts = json.loads(path.read_text())
    facts["rows"][0]["work"]["formats"][1]["element"]["bias"] += 1
    path.write_text(json.dumps(facts))
    (row,) = read(path)
    assert row.work != ROW.work
    assert row.work.formats[1] is not None and row.work.formats[1].name == "mxfp4"


def changed(**changes: Any) -> str:
    facts = {"schema": SCHEMA, "rows": [{"backend": "pallas_gpu"} | changes]}
    return json.dumps(facts)


DAMAGED = {
    "empty": "",
    "torn": '{"schema": 2, "rows": [',
    "no object": "[]",
    "no rows": '{"schema": 2}',
    "no schema": '{"rows": []}',
    "a row with too little": changed(),
    "a row with too much": changed(color="blue"),
    "no row": '{"schema": 2, "rows": [7]}',
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_damaged_files(
    text: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    cache.parent.mkdir()
    cache.write_text(text)
    with pytest.raises(ValueError) as error:
        read(cache)
    message = str(error.value)
    assert message.startswith(
        "evidence: needs a file of measured rows as `python -m mx_jax gpu` writes it, got "
        f"path={str(cache)!r}: "
    )
    assert message.endswith("measure again with `python -m mx_jax gpu`, or remove the file")
    # Found by itself, it is told once and counts as empty; named, it is an error.
    with caplog.at_level(logging.WARNING):
        assert evidence.loaded() == evidence.loaded() == read(evidence.SHIPPED)
    assert [record.getMessage() for record in caplog.records] == [
        f"{message}; until then it counts as empty"
    ]
    evidence.loaded.cache_clear()
    monkeypatch.setenv(evidence.VARIABLE, str(cache))
    with pytest.raises(ValueError, match=r"^MX_JAX_EVIDENCE: needs a file of measured rows as"):
        evidence.loaded()


@pytest.mark.parametrize(
    "change", [{"error": "small"}, {"date": 7}, {"shape": "16"}, {"driver": 5}]
)
def test_rows_of_wrong_types(change: dict[str, Any], tmp_path: Path):
    path = tmp_path / "rows.json"
    write(path, [ROW])
    facts = json.loads(path.read_text())
    facts["rows"][0] |= change
    path.write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=f"{next(iter(change))} must not be"):
        read(path)


def test_another_schema(tmp_path: Path):
    path = tmp_path / "rows.json"
    path.write_text('{"schema": 1, "rows": []}')
    with pytest.raises(ValueError, match="evidence: needs rows of schema 2, got schema=1 in path="):
        read(path)


def test_a_named_file_that_is_not_there(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(evidence.VARIABLE, str(cache))
    with pytest.raises(ValueError, match="FileNotFoundError"):
        evidence.loaded()


def test_which_rows_count(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    shipped = dataclasses.replace(ROW, driver="1.2.3", over_plain=1.5)
    other = dataclasses.replace(ROW, kernel="mma", driver="570.1")
    monkeypatch.setattr(evidence, "SHIPPED", tmp_path / "shipped.json")
    write(evidence.SHIPPED, [shipped])
    write(cache, [ROW, other])
    named = tmp_path / "named.json"
    write(named, [dataclasses.replace(ROW, kernel="named"), other])

    def counted(value: str | None) -> tuple[Row, ...]:
        evidence.loaded.cache_clear()
        if value is None:
            monkeypatch.delenv(evidence.VARIABLE, raising=False)
        else:
            monkeypatch.setenv(evidence.VARIABLE, value)
        return in_force()

    # A driver's rows are for that driver, but those that ship are for all.
    assert counted(None) == counted("") == (shipped, ROW)
    assert counted("off") == ()
    assert counted("shipped") == (shipped,)
    assert [row.kernel for row in counted(str(named))] == ["named"]
    monkeypatch.setattr(evidence, "driver", lambda: None)
    assert counted(None) == (shipped,)


def test_rows_of_another_driver_are_told(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Of a file that the user names; a cache keeps rows of drivers before."""
    other = dataclasses.replace(ROW, driver="570.1")
    write(cache, [ROW, other, FAILED])
    assert other not in in_force() and not caplog.records
    evidence.loaded.cache_clear()
    monkeypatch.setenv(evidence.VARIABLE, str(cache))
    assert in_force() == (ROW,)
    assert (
        f"2 of 3 in MX_JAX_EVIDENCE={str(cache)!r} do not count, measured with driver=570.1, None, "
        "got driver=580.95.05; `python -m mx_jax gpu` measures here"
    ) in caplog.text
    caplog.clear()
    evidence.loaded.cache_clear()
    write(cache, [ROW])
    assert in_force() == (ROW,) and not caplog.records


def test_several_processes_trace_one_program(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    write(cache, [ROW])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert evidence.loaded() == read(evidence.SHIPPED)
    assert not caplog.records
    evidence.loaded.cache_clear()
    monkeypatch.setenv(evidence.VARIABLE, str(cache))
    assert evidence.loaded() == read(evidence.SHIPPED)
    assert "with several processes only shipped rows count, got MX_JAX_EVIDENCE=" in caplog.text
    evidence.loaded.cache_clear()
    monkeypatch.setenv(evidence.VARIABLE, "off")
    assert evidence.loaded() == ()


def test_files_are_read_once(cache: Path):
    write(cache, [ROW])
    before = in_force()
    write(cache, [])
    assert in_force() is before and ROW in before


def test_the_last_row_of_a_place_counts():
    again = dataclasses.replace(ROW, error=0.5, date="2026-11-21")
    elsewhere = dataclasses.replace(ROW, device_kind="NVIDIA B200")
    assert merged([ROW, elsewhere], [again]) == (again, elsewhere)


def test_what_ships_was_measured_on_gpus():
    """And not on what simulates one."""
    for row in read(evidence.SHIPPED):
        assert row.device_kind.startswith("NVIDIA ") and row.shape and row.date


def test_what_ships_counts():
    """Another source of the kernels than the measured one switches all of them off.

    Then measure anew on a GPU. Where a change leaves the lowered programs of the measured products
    as they are, letter for letter, it is enough to write the new hash into the rows.
    """
    rows = read(evidence.SHIPPED)
    assert {row.source for row in rows} == {evidence.source_of(PALLAS_GPU)}
    assert all(row.switches_packing_on for row in rows)


def test_the_hash_is_that_of_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from mx_jax.backends.cudnn import CUDNN
    from mx_jax.backends.reference import REFERENCE

    hashes = {evidence.source_of(PALLAS_GPU), evidence.source_of(CUDNN)}
    assert len(hashes) == 2 and None not in hashes
    assert evidence.source_of(REFERENCE) is None
    assert PALLAS_GPU.source is not None
    names = {path.name for path in PALLAS_GPU.source()}
    assert {"wgmma.py", "mma.py", "tcgen05.py", "quantize_kernel.py", "decode.py"} <= names
    file = tmp_path / "kernel.py"
    file.write_text("one")
    own = [dataclasses.replace(CUDNN, name=name, source=lambda: (file,)) for name in "ab"]
    first = evidence.source_of(own[0])
    file.write_text("two")
    assert evidence.source_of(own[0]) == first != evidence.source_of(own[1])


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC "
            "2024\nGCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n",
            "550.54.15",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  "
            "(root@host)  \n",
            "580.95.05",
        ),
        ("nothing", None),
    ],
)
def test_the_driver(text: str, version: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Path, "read_text", lambda self, encoding: text)
    assert evidence.driver.__wrapped__() == version
