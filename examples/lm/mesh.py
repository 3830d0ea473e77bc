"""Where a run's arrays lie on a mesh of devices. Without a mesh in context nothing is changed."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from .settings import Settings

AXES = ("data", "fsdp", "model")
# Seconds that a process waits for the others to come as far as it is.
PATIENCE = 900
# A barrier's name must be new each time, and the same in every process.
_barriers = itertools.count()
_compiled: set[Any] = set()
# The batch along both axes that shard tokens; features of weights along `model`, and along `fsdp`
# what is gathered for each product. The first axis of a block's weights is that of the layers.
BATCH = P(("data", "fsdp"), None)
WEIGHTS = {
    "qkv": P(None, "fsdp", "model"),
    "out": P(None, "model", "fsdp"),
    "up": P(None, "fsdp", "model"),
    "down": P(None, "model", "fsdp"),
    "tokens": P(None, "fsdp"),
    "head": P("fsdp", None),
}


def parse_mesh(text: str) -> dict[str, int]:
    """`"data=2,fsdp=2,model=2"` as the sizes of all axes; 1 by default."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name not in AXES or name in sizes or not size.isdecimal() or not int(size):
            raise ValueError(
                f"mesh names axes of {', '.join(AXES)} once, with their sizes, got {text!r}; "
                "e.g. data=2,fsdp=2,model=2"
            )
        sizes[name] = int(size)
    return {name: sizes.get(name, 1) for name in AXES}


def check_fits(sizes: dict[str, int], settings: Settings) -> None:
    """Raises ValueError if an axis does not divide the sizes that it shards."""
    rows = sizes["data"] * sizes["fsdp"]
    for name, divisor, axes in (
        ("batch", rows, "data * fsdp"),
        ("d_model", sizes["fsdp"], "fsdp"),
        ("heads", sizes["model"], "model"),
    ):
        if getattr(settings, name) % divisor:
            raise ValueError(
                f"{name} must be a multiple of {axes}, got {name}={getattr(settings, name)} on a "
                f"mesh of {', '.join(f'{axis}={size}' for axis, size in sizes.items())}"
            )


def make_mesh(sizes: dict[str, int]) -> Mesh:
    """The mesh of all devices of all processes."""
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


def _pinned(x: jax.Array, spec: P) -> jax.Array:
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec)


def place_batch(tokens: jax.Array) -> jax.Array:
    """Windows [batch, ...], each device with its own."""
    return _pinned(tokens, BATCH)


def place_state(state: Any) -> Any:
    """Parameters and whatever the optimizer keeps of each, by the names in their paths."""

    def place(path: Any, leaf: jax.Array) -> jax.Array:
        names = [getattr(entry, "key", None) for entry in path]
        specs = [WEIGHTS[name] for name in names if name in WEIGHTS]
        # Scales of leaves that quantize_state does not quantize are numbers.
        return _pinned(leaf, specs[0] if specs and leaf.ndim else P())

    return jax.tree_util.tree_map_with_path(place, state)


def is_first() -> bool:
    """Whether this process is the one that writes files."""
    return jax.process_index() == 0


def wait_for_all(what: str) -> None:
    """Returns when every process has come here."""
    if jax.process_count() > 1:
        # By the coordinator: a sum over devices, as JAX's own barrier is, would not wait so long.
        everyone = set(range(jax.process_count()))
        name = f"{what} {next(_barriers)}"
        ocp.multihost.sync_global_processes(name, timeout=PATIENCE, processes=everyone)


def together(function: Any, *args: Any, **static: Any) -> Any:
    """Calls a jitted function, which every process has compiled before the first one runs it.

    Gloo connects the processes at their first sum, and waits for half a minute: a machine that is
    busy compiling may need longer.
    """
    key = (function, *static.items())
    if jax.process_count() > 1 and key not in _compiled:
        function.lower(*args, **static).compile()
        wait_for_all(f"compiled {function.__name__}")
        _compiled.add(key)
    return function(*args, **static)


def any_says(here: bool) -> bool:
    """Whether any process says so: every process gets the same answer."""
    if jax.process_count() == 1:
        return here
    return bool(multihost_utils.process_allgather(np.array(here)).any())
