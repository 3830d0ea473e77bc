"""What four H200s keep and exchange, as JSON: the step of docs/sharding.md, or rows of experts.

    python tests/gpu/compile_devices.py mxfp8
    python tests/gpu/compile_devices.py experts

A process of its own: the CUDA plugin stays loaded. Read from compiled modules, not measured.
"""

import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

from jax.experimental import topologies

from benchmarks.collectives import Case, lowered
from tests.contracts.test_docs import section
from tests.gpu.compile_for import GPUS
from tests.processes import ROOT
from tests.sharding.collectives import collectives

if __name__ == "__main__":
    devices = topologies.get_topology_desc(
        platform="cuda", target_config=GPUS["sm_90a"].description(), topology="1x1x4"
    ).devices
    if sys.argv[1] == "experts":
        case = Case("experts, capacity", "shard_map", "mxfp4", "bfloat16")
        print(json.dumps(collectives(lowered(case, devices).compile().as_text())))
    else:
        page = section(ROOT / "docs" / "sharding.md", "A step for devices that are not there")
        print(json.dumps(page["summary"](page["compiled_for"](devices, sys.argv[1]))))
