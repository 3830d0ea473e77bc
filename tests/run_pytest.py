"""Runs pytest from Bazel, on the paths given: what each test target of BUILD starts."""

import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    root = Path(__file__).parents[1]
    options = ["-c", str(root / "pyproject.toml"), "-p", "no:cacheprovider"]
    sys.exit(pytest.main([*options, *(str(root / path) for path in sys.argv[1:])]))
