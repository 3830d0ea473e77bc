"""The golden files are the ones that MANIFEST.json describes, and no array of them is left out."""

import collections
import hashlib

import pytest

from tests.conformance import golden, tables


@pytest.mark.parametrize("file", golden.FILES)
def test_file_is_the_published_one(file: str):
    facts = golden.MANIFEST["files"][file]
    contents = (golden.DATA / file).read_bytes()
    assert len(contents) == facts["bytes"]
    assert hashlib.sha256(contents).hexdigest() == facts["sha256"]


def test_no_file_is_missing_or_extra():
    files = {path.name for path in golden.DATA.iterdir()}
    assert files == {*golden.FILES, "MANIFEST.json"}


@pytest.mark.parametrize("file", golden.FILES)
def test_arrays_are_listed(file: str):
    facts = golden.MANIFEST["files"][file]
    held = {
        name: f"{array.dtype}{list(array.shape)}" for name, array in golden.arrays(file).items()
    }
    assert held == facts["list"]
    assert len(held) == facts["arrays"]


def visits() -> collections.Counter[tuple[str, str]]:
    """How often the tests of this folder compare or read each array."""
    count: collections.Counter[tuple[str, str]] = collections.Counter()
    for source, cases in golden.sources().items():
        count[source] += 1
        for case in cases:
            count.update((case.file, name) for name in case.outputs.values())
            if case.given_scale is not None:
                count[case.file, case.given_scale] += 1
    count.update(tables.ARRAYS)
    return count


def test_every_array_is_visited_once():
    everything = {(file, name) for file in golden.FILES for name in golden.arrays(file)}
    count = visits()
    assert everything - count.keys() == set(), "arrays that no test compares"
    assert count.keys() - everything == set(), "arrays that tests name but no file holds"
    assert set(count.values()) == {1}, "arrays compared twice: a name was parsed wrongly"


def test_number_of_cases():
    """Parsing finds what is there, so that a pattern that stops matching is noticed."""
    kinds = collections.Counter(case.file.partition("_")[0] for case in golden.cases())
    # 7 layouts x 6 formats x 4 rules x 2 dtypes; 6 formats x 2 block sizes x 4 rules x 2 dtypes;
    # two roundings, and INT8's full range; NVFP4 on four inputs three ways and four hard ones.
    assert kinds == {"blocks": 336, "edges": 96, "rounding": 52, "nvfp4.npz": 16}
    assert len(golden.sources()) == 14 + 24 + 8
    outputs = sum(len(case.outputs) for case in golden.cases())
    compared = outputs + len(tables.ARRAYS) - len(tables.INPUTS)
    total = sum(golden.MANIFEST["files"][file]["arrays"] for file in golden.FILES)
    read = len(golden.sources()) + len(tables.INPUTS)
    given = sum(case.given_scale is not None for case in golden.cases())
    assert compared + read + given == total == 1469
