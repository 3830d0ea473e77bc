"""`python -m mx_jax formats`: what tables and lists of codes say; errors are one line."""

from typing import Any

import numpy as np
import pytest

from mx_jax.commands import main
from mx_jax.formats import BLOCK_FORMATS, ELEMENT_FORMATS, SCALE_FORMATS, any_format
from tests.cli.conftest import Cli
from tests.processes import run_python


def tables(cli: Cli, *arguments: str) -> dict[str, list[dict[str, str]]]:
    """Rows of every table that a command prints, by title."""
    result: dict[str, list[dict[str, str]]] = {}
    title, columns = "", []
    for line in cli("formats", *arguments)[0].splitlines():
        cells = [cell.strip() for cell in line.strip("┃│").replace("┃", "│").split("│")]
        if line.startswith("┃"):
            columns = cells
            result[title] = []
        elif line.startswith("│"):
            result[title].append(dict(zip(columns, cells, strict=True)))
        elif line.strip() and line[0] not in "┏┡└":
            title = line.strip()
    return result


# Some rows in full: floats with and without special values, integers; scales; blocks.
ROWS = """
e2m1 4 2 1 1 2 6 2^0 2^-1 -0 21.6 float4_e2m1fn
e5m2 8 5 2 15 15 57344 2^-14 2^-16 Inf,NaN,-0 191.5 float8_e5m2
e4m3fnuz 8 4 3 8 7 240 2^-7 2^-10 NaN,no-0 107.8 float8_e4m3fnuz
int8 8 - 6 - 0 1.984375 - 2^-6 -2neverwritten 42.1 int8
int8_full 8 - 6 - 0 1.984375 - 2^-6 -2 42.1 int8
e8m0 8 127 2^127 2^-127 code*scale float8_e8m0fnu
e4m3 8 7 448 2^-9 code*scale float8_e4m3fn
f32_divisor 32 - 3.40282e+38 2^-149 code/scale float32
mxfp4 e2m1 e8m0 1x32 - 4.25
nvfp4 e2m1 e4m3 1x16 f32 4.5
float8_tensorwise_e4m3 e4m3 f32_divisor wholexwhole - 8
"""


def test_tables(cli: Cli):
    elements, scales, blocks = tables(cli).values()
    for result, formats in zip(
        (elements, scales, blocks), (ELEMENT_FORMATS, SCALE_FORMATS, BLOCK_FORMATS), strict=True
    ):
        assert [row["name"] for row in result] == [format.name for format in formats]
    printed = [
        [cell.replace(" ", "") for cell in row.values()] for row in elements + scales + blocks
    ]
    for row in ROWS.strip().splitlines():
        assert row.split() in printed


@pytest.mark.parametrize("name", ["e2m1", "int8", "e8m0"])
def test_every_code(name: str, cli: Cli):
    format: Any = any_format(name)
    ((title, rows),) = tables(cli, "--values", name).items()
    assert title == f"{type(format).__name__} {name}"
    expected = np.arange(1 << format.bits, dtype=np.uint8).view(format.dtype).astype(np.float64)
    expected = expected / 64 if name == "int8" else expected
    digits = 1 if name == "e2m1" else 2
    for code, row in enumerate(rows):
        assert row["code"] == str(code) and row["hex"] == f"0x{code:0{digits}X}"
        assert row["binary"] == f"{code:0{format.bits}b}"
    np.testing.assert_array_equal([float(row["value"]) for row in rows], expected)
    signs = [row["value"].startswith("-") for row in rows if row["value"] != "nan"]
    np.testing.assert_array_equal(signs, np.signbit(expected[~np.isnan(expected)]))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("MXFP4", ["ElementFormat e2m1", "ScaleFormat e8m0"]),
        # Codes of float32 are too many.
        ("float8_rowwise_e4m3", ["ElementFormat e4m3"]),
    ],
)
def test_codes_of_a_block_format(name: str, parts: list[str], cli: Cli):
    assert list(tables(cli, "--values", name)) == parts


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("e9m9", "unknown format name='e9m9'; known: mxfp8_e4m3, "),
        ("f32", "formats --values: f32 is float32, whose codes are too many to list"),
    ],
)
def test_formats_without_a_list_of_codes(name: str, complaint: str, cli: Cli):
    assert cli.error("formats", "--values", name).startswith(f"mx_jax: {complaint}")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("quantize", ["[[rule]]", "--format nvfp4 --dry-run"]),
        ("convert", ["layouts: ", "mx_jax", "torchao", "gpt-oss"]),
        ("env", ["--json", "C++ library"]),
    ],
)
def test_help_of_commands(command: str, words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and all(word in text for word in words)


def test_help(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    assert "usage: python -m mx_jax" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["nothing"])
    assert stop.value.code == 2
    assert "invalid choice: 'nothing'" in capsys.readouterr().err


def test_as_a_program():
    """Through a pipe no column is cut, however narrow the terminal would be."""
    result = run_python("-m", "mx_jax", "formats", PYTHONIOENCODING="utf-8", COLUMNS="40")
    assert (result.returncode, result.stderr) == (0, "")
    for format in (*ELEMENT_FORMATS, *SCALE_FORMATS, *BLOCK_FORMATS):
        assert f" {format.name} " in result.stdout
    assert "…" not in result.stdout
