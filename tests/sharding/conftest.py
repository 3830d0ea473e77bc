"""What most tests of several devices share."""

import pytest
from jax.sharding import Mesh

from tests.sharding.collectives import mesh_of


@pytest.fixture(scope="session")
def mesh() -> Mesh:
    """Four by two devices, on axes that the compiler splits."""
    return mesh_of()
