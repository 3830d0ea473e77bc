"""The machine that a call is for: what a context names, else where JAX would run it."""

import contextlib
import dataclasses
import math
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.core import Tracer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The machine that will run a call.

    Attributes:
      platform: jax's name, `"cpu"`, `"cuda"`, `"rocm"` or `"tpu"`.
      compute_capability: e.g. `(9, 0)` on an H200; None where there is none.
      num_devices: between how many devices `jit` may split the call.
      counted: whether that is known while JAX traces. If not, it is the most that there may be:
        lowering tells whether the program has one device.
      device_kind: jax's name of an accelerator, e.g. `"NVIDIA H200"`, by which measurements are
        found; None for CPUs, and where it is not known.
    """

    platform: str
    compute_capability: tuple[int, int] | None = None
    num_devices: int = 1
    counted: bool = True
    device_kind: str | None = None


# jax.Device is no type to a type checker.
Device = Any
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

# Both enter jit's cache key: what was traced for one machine is not reused for another.
_named = jax.make_user_context(default_value=None)
_of_arrays = jax.make_user_context(default_value=None)

# Set where lowering knows that no devices share a call: then a compiled handler need not tell the
# compiler how they may split it.
on_one_device = jax.make_user_context(default_value=False)


def use_target(target: Target) -> AbstractContextManager[None]:
    """A context in which every call is for this machine, whether it is there or not."""
    return _named(target)


def follow(*operands: Any) -> AbstractContextManager[None]:
    """A context for the devices that committed arrays lie on, if all operands are such arrays.

    For calls outside `jit`, `grad` and `vmap`: JAX runs them there, and a traced value does not
    know its devices.
    """
    leaves = jax.tree.leaves(operands)
    if not leaves or any(isinstance(x, Tracer) or not isinstance(x, jax.Array) for x in leaves):
        return contextlib.nullcontext()
    devices = [min(x.devices(), key=lambda device: device.id) for x in leaves if x.committed]
    if not devices or _kind(devices[0]) == _kind(_device()):
        return contextlib.nullcontext()
    return _of_arrays(devices[0])


def _kind(device: Device) -> tuple[str, str]:
    return device.platform, device.device_kind


def current_target(num_devices: int | None = None) -> Target:
    """The machine that a call is for.

    In this order: what `use_target` names; the devices of committed arrays outside `jit`
    (`follow`); those of the mesh in context (`jax.set_mesh`, `jax.shard_map`); the device of
    `jax.default_device`; JAX's first. All of it is in jit's cache key, and all of it is known while
    tracing. Where a traced function is run elsewhere nevertheless, what was chosen is lowered there
    in plain JAX, or refused.

    Args:
      num_devices: instead of the machine's.
    """
    named = _named.value
    if named is not None:
        return named if num_devices is None else dataclasses.replace(named, num_devices=num_devices)
    device, counted = _device(), True
    if num_devices is None:
        num_devices = _number_of(device)
        counted = num_devices == 1 or not jax.sharding.get_abstract_mesh().empty
    return dataclasses.replace(_described(device), num_devices=num_devices, counted=counted)


def machine_of(platform: str) -> Target:
    """One device of a platform, as far as this host has it."""
    try:
        return _described(jax.devices(platform)[0])
    except RuntimeError:  # a platform that is not here
        return Target(platform=platform)


def _described(device: Device) -> Target:
    platform, numbers = _platform(device), None
    capability = getattr(device, "compute_capability", None)
    if capability is not None and platform == "cuda":
        major, _, minor = str(capability).partition(".")
        numbers = (int(major), int(minor or 0))
    kind = None if platform == "cpu" else device.device_kind
    return Target(platform=platform, compute_capability=numbers, device_kind=kind)


def _device() -> Device:
    """A device like the one that jax would use."""
    if _of_arrays.value is not None:
        return _of_arrays.value
    in_mesh = _device_of_mesh()
    if in_mesh is not None:
        return in_mesh
    default: Any = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(default, str):
        return jax.devices(default)[0]
    return jax.devices()[0] if default is None else default


def _device_of_mesh() -> Device | None:
    """A device here like those of the mesh in context, or None where there is none."""
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if described is None:
        return None
    try:
        devices = jax.devices(described.platform)
    except RuntimeError:
        # A mesh for a machine that is not there; `testing.target` names one.
        return None
    return next((d for d in devices if _kind(d)[1] == described.device_kind), None)


def _number_of(device: Device) -> int:
    """Between how many devices `jit` may split a call.

    Those of the mesh in context, since JAX refuses arrays on others, along the axes that are jit's
    to split: below `jax.shard_map` each device has a call of its own. Without a mesh at most all of
    the platform; of a device that is only compiled for, one.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        return math.prod(size for name, size in mesh.shape.items() if name not in mesh.manual_axes)
    try:
        return jax.device_count(device.platform)
    except RuntimeError:
        return 1


def _platform(device: Device) -> str:
    if device.platform != "gpu":
        return device.platform
    # So jax calls both kinds; the client's version says which.
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
