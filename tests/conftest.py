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


def pytest_itemcollected(item: pytest.Item) -> None:
    """Who leaves a test out on one Python says why, in a sentence that a reader can check."""
    for mark in item.iter_markers("one_python"):
        reason = mark.kwargs.get("reason", "")
        if mark.args or set(mark.kwargs) != {"reason"} or len(reason.split()) < 3:
            raise pytest.UsageError(
                f"{item.nodeid}: one_python needs reason='why it depends on no version', got "
                f"args={mark.args}, kwargs={mark.kwargs}"
            )
