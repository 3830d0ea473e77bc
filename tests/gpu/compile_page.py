"""The step of docs/sharding.md for four H200s: what each device keeps and exchanges, as JSON.

    python tests/gpu/compile_page.py mxfp8

A process of its own: the CUDA plugin stays loaded.
"""

import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

from jax.experimental import topologies

from tests.contracts.test_docs import section
from tests.gpu.compile_for import GPUS
from tests.processes import ROOT

if __name__ == "__main__":
    page = section(ROOT / "docs" / "sharding.md", "A step for devices that are not there")
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=GPUS["sm_90a"].description(), topology="1x1x4"
    )
    print(json.dumps(page["summary"](page["compiled_for"](topology.devices, sys.argv[1]))))
