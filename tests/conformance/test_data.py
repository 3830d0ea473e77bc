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
