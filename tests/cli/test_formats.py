"""`python -m mx_jax formats`: tables say what ml_dtypes says, errors are one line."""

import math
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mx_jax.cli import main
from mx_jax.formats import BLOCK_FORMATS, ELEMENT_FORMATS, SCALE_FORMATS, BlockFormat, ElementFormat

ROOT = Path(__file__).parents[2]


def tables(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, list[dict[str, str]]]:
    """Rows of every table that a command prints, by title."""
    assert main(["formats", *arguments]) == 0
    found: dict[str, list[dict[str, str]]] = {}
    title, columns = "", []
    for line in capsys.readouterr().out.splitlines():
        cells = [cell.strip() for cell in line.strip("┃│").replace("┃", "│").split("│")]
        if line.startswith("┃"):
            columns = cells
            found[title] = []
        elif line.startswith("│"):
            found[title].append(dict(zip(columns, cells, strict=True)))
        elif line.strip() and line[0] not in "┏┡└":
            title = line.strip()
    return found


def number(cell: str) -> float:
    base, _, exponent = cell.partition("^")
    return float(base) ** int(exponent) if exponent else float(base)


def test_element_table(capsys: pytest.CaptureFixture[str]):
    rows = tables(capsys)["Element formats"]
    assert [row["name"] for row in rows] == [element.name for element in ELEMENT_FORMATS]
    for row, element in zip(rows, ELEMENT_FORMATS, strict=True):
        check_row(row, element)


def check_row(row: dict[str, str], element: ElementFormat) -> None:
    assert row["dtype"] == np.dtype(element.dtype).name
    if element.kind == "int":
        assert (row["bits"], row["man"], row["emax"]) == ("8", "6", "0")
        assert (row["exp"], row["bias"], row["smallest normal"]) == ("-", "-", "-")
        assert (number(row["max"]), number(row["smallest subnormal"])) == (127 / 64, 1 / 64)
        assert row["special values"] == ("-2" if element.negative_extra else "-2 never written")
        return
    info = ml_dtypes.finfo(element.dtype)
    assert (int(row["bits"]), int(row["exp"]), int(row["man"])) == (
        info.bits,
        info.nexp,
        info.nmant,
    )
    assert (1 - int(row["bias"]), int(row["emax"])) == (info.minexp, info.maxexp - 1)
    assert number(row["max"]) == float(info.max)
    assert number(row["smallest normal"]) == float(info.smallest_normal)
    smallest = float(info.smallest_subnormal)
    assert number(row["smallest subnormal"]) == smallest
    assert row["range dB"] == f"{20 * math.log10(float(info.max) / smallest):.1f}"


def test_special_values(capsys: pytest.CaptureFixture[str]):
    specials = {row["name"]: row["special values"] for row in tables(capsys)["Element formats"]}
    assert specials == {
        "e4m3": "NaN, -0",
        "e5m2": "Inf, NaN, -0",
        "e2m3": "-0",
        "e3m2": "-0",
        "e2m1": "-0",
        "int8": "-2 never written",
        "int8_full": "-2",
        "e4m3fnuz": "NaN, no -0",
        "e5m2fnuz": "NaN, no -0",
    }


def test_scale_table(capsys: pytest.CaptureFixture[str]):
    rows = tables(capsys)["Scale formats"]
    facts = {row["name"]: (row["bits"], row["bias"], row["value"], row["dtype"]) for row in rows}
    assert facts == {
        "e8m0": ("8", "127", "code * scale", "float8_e8m0fnu"),
        "e4m3": ("8", "7", "code * scale", "float8_e4m3fn"),
        "f32": ("32", "-", "code * scale", "float32"),
        "f32_divisor": ("32", "-", "code / scale", "float32"),
    }
    ends = {row["name"]: (row["max"], row["smallest"]) for row in rows}
    assert ends["e8m0"] == ("2^127", "2^-127")
    assert ends["e4m3"] == ("448", "2^-9")


def test_block_table(capsys: pytest.CaptureFixture[str]):
    (title,) = (title for title in tables(capsys) if title.startswith("Block formats"))
    rows = tables(capsys)[title]
    assert [row["name"] for row in rows] == [format.name for format in BLOCK_FORMATS]
    for row, format in zip(rows, BLOCK_FORMATS, strict=True):
        assert (row["element"], row["scale"]) == (format.element.name, format.scale.name)
        assert (row["tensor scale"] == "f32") == format.tensor_scale
    bits = {row["name"]: (row["block"], row["bits per element"]) for row in rows}
    assert bits["mxfp4"] == ("1 x 32", "4.25")
    assert bits["nvfp4"] == ("1 x 16", "4.5")
    assert bits["float8_tensorwise_e4m3"] == ("whole x whole", "8")


@pytest.mark.parametrize(
    "format", [*ELEMENT_FORMATS, SCALE_FORMATS[0]], ids=lambda format: format.name
)
def test_every_code(format, capsys: pytest.CaptureFixture[str]):
    ((title, rows),) = tables(capsys, "--values", format.name).items()
    assert title == f"{type(format).__name__} {format.name}"
    count = 1 << format.bits
    expected = np.arange(count, dtype=np.uint8).view(format.dtype).astype(np.float64)
    if format.dtype == np.int8:
        expected = expected / 64
    digits = 2 if format.bits > 4 else 1
    assert [row["code"] for row in rows] == [str(code) for code in range(count)]
    assert [row["hex"] for row in rows] == [f"0x{code:0{digits}X}" for code in range(count)]
    assert [int(row["binary"], 2) for row in rows] == list(range(count))
    assert {len(row["binary"]) for row in rows} == {format.bits}
    values = np.array([float(row["value"]) for row in rows])
    np.testing.assert_array_equal(values, expected)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.signbit(values[finite]), np.signbit(expected[finite]))


@pytest.mark.parametrize("name", ["mxfp4", "MXFP4", "nvfp4", "float8_rowwise_e4m3"])
def test_codes_of_a_block_format(name: str, capsys: pytest.CaptureFixture[str]):
    """Element and scale, unless the scale is a float32."""
    (format,) = (format for format in BLOCK_FORMATS if format.name == name.lower())
    assert isinstance(format, BlockFormat)
    expected = [f"ElementFormat {format.element.name}"]
    if not format.scale.is_float32:
        expected.append(f"ScaleFormat {format.scale.name}")
    found = tables(capsys, "--values", name)
    assert list(found) == expected
    assert len(found[expected[0]]) == 1 << format.element.bits


def test_unknown_format(capsys: pytest.CaptureFixture[str]):
    assert main(["formats", "--values", "e9m9"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("mx_jax: unknown format name='e9m9'; known: mxfp8_e4m3, ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("name", ["f32", "f32_divisor"])
def test_codes_that_are_too_many(name: str, capsys: pytest.CaptureFixture[str]):
    assert main(["formats", "--values", name]) == 2
    expected = f"mx_jax: formats --values: {name} is float32, whose codes are too many to list\n"
    assert capsys.readouterr() == ("", expected)


def test_help(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    assert "usage: python -m mx_jax" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["nothing"])
    assert stop.value.code == 2
    assert "invalid choice: 'nothing'" in capsys.readouterr().err


def test_as_a_program():
    """Through a pipe no column is cut, however narrow the terminal would be."""
    result = subprocess.run(
        [sys.executable, "-m", "mx_jax", "formats"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", "COLUMNS": "40"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    for format in (*ELEMENT_FORMATS, *SCALE_FORMATS, *BLOCK_FORMATS):
        assert f" {format.name} " in result.stdout
    assert "float8_e5m2fnuz" in result.stdout
    assert "…" not in result.stdout
