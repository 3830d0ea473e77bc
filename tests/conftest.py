"""What every test shares: eight CPU devices, repeatable randomness."""

import os
import zlib

NUM_CPU_DEVICES = 8

# Read when JAX's first backend starts, so it is set before any test imports JAX.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={NUM_CPU_DEVICES}"
).strip()

import hypothesis  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

# The same examples on every run. `--hypothesis-profile=explore` looks for new ones.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator of its own for each test, seeded by the test's name."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))
