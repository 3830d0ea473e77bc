"""Damaged files of every kind are read, or refused with their name."""

from pathlib import Path

from tests.checkpoint import mutate
from tests.checkpoint.samples import samples


def test_a_few_inputs():
    """The full run is `python -m tests.checkpoint.mutate --count 100000`."""
    counts, findings = mutate.run(1, range(300))
    assert not findings
    assert sum(counts.values()) == 300
    kinds = {kind for kind, _ in counts}
    assert kinds == {sample.name for sample in samples()}
    assert {kind for kind, what in counts if what == "refused"} == kinds
    # Not everything breaks a file, and what does not has been read to its end.
    assert sum(counts[kind, "read"] for kind in kinds) > 20


def test_unchanged_files_are_read(tmp_path: Path):
    for sample in samples():
        folder = tmp_path / sample.name
        mutate.put(folder, sample.files)
        assert mutate.outcome(sample.read, folder) == "read", sample.name
