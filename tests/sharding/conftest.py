"""What most tests of several devices share."""

import pytest
from jax.sharding import Mesh

from tests.sharding.collectives import mesh_of


@pytest.fixture(scope="module")
def mesh(request: pytest.FixtureRequest) -> Mesh:
    """Devices on axes that the compiler splits: four by two, or as the module's `AXES` say."""
    return mesh_of(**getattr(request.module, "AXES", {}))
