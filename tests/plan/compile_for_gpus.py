"""Check plans against programs compiled for eight H200s; a line for each that holds.

    python tests/plan/compile_for_gpus.py

A process of its own: the CUDA plugin stays loaded.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from jax.experimental import topologies

from mx_jax import recipes
from tests.gpu.compile_for import GPUS
from tests.plan.test_traffic import SETUPS, check

if __name__ == "__main__":
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=GPUS["sm_90a"].description(), topology="1x1x8"
    )
    with jax.default_device(topology.devices[0]):
        for setup in SETUPS:
            for name in ("high_precision", "mxfp8", "mxfp4"):
                check(setup, recipes.from_name(name), topology.devices)
                print(name, setup, flush=True)
