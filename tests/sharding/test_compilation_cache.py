"""Programs of several devices in JAX's persistent compilation cache."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

# Programs of equal shapes that differ in format, rule or recipe alone.
PROGRAM = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import mx_jax

# What JAX adds to keys is the address of a callback: without this no program is found again.
jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name.endswith("cache_hits")))

mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
rng = np.random.default_rng(0)
place = NamedSharding(mesh, P("data"))
x = jax.device_put(rng.normal(size=(32, 64)).astype(np.float32), place)
w = jax.device_put(rng.normal(size=(64, 32)).astype(np.float32), place)
recipes = {
    "e4m3": mx_jax.recipes.weight_only("mxfp8_e4m3"),
    "e5m2": mx_jax.recipes.weight_only("mxfp8_e5m2"),
    "floor": mx_jax.recipes.mxfp4().with_(scale_rule="floor"),
    "even": mx_jax.recipes.mxfp4(),
    "mxfp8": mx_jax.recipes.mxfp8(),
}
found = {}
for name, recipe in recipes.items():
    before = sum(hits)
    y = jax.jit(lambda x, w: mx_jax.matmul(x, w, recipe=recipe))(x, w)
    found[name] = [sum(hits) > before, np.asarray(y).view(np.uint32).ravel().tolist()]
print(json.dumps(found))
"""


def run(folder: Path | None) -> dict[str, Any]:
    own = {} if folder is None else {"JAX_COMPILATION_CACHE_DIR": str(folder)}
    flags = "--xla_force_host_platform_device_count=4"
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)} | own,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_each_is_found_again_and_none_stands_for_another(tmp_path: Path):
    expected = {name: values for name, (_, values) in run(None).items()}
    assert len({tuple(values) for values in expected.values()}) == len(expected)
    first, second = run(tmp_path), run(tmp_path)
    assert not any(hit for hit, _ in first.values())
    assert all(hit for hit, _ in second.values())
    for found in (first, second):
        assert {name: values for name, (_, values) in found.items()} == expected
