"""What selection knows: backends by what they offer, the machine of a call, what contexts say."""

import contextlib
import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.core import Tracer

from mx_jax.backends import calls
from mx_jax.backends.calls import Call
from mx_jax.codecs.lowering import Lowering, lowering

# What a call asks for, in words for users.
ASKS: Mapping[type[Call], str] = {
    calls.MatmulCall: "multiply",
    calls.RaggedCall: "multiply rows in groups",
    calls.QuantizeCall: "cast",
    calls.QuantizeBothCall: "cast along both axes at once",
    calls.ValuesCall: "give the values of codes that are not there yet",
    calls.DequantizeCall: "dequantize",
    calls.PackCall: "lay out weights",
    calls.AttendCall: "attend over a cache",
    calls.CastStatisticsCall: "count what casts lose",
    calls.RandomBitsCall: "draw random bits",
    calls.TransformCall: "transform",
}


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
      program_devices: how many devices the program has, those of `jax.shard_map` too, which share
        no call.
    """

    platform: str
    compute_capability: tuple[int, int] | None = None
    num_devices: int = 1
    counted: bool = True
    device_kind: str | None = None
    program_devices: int = 1

    @property
    def multiplies(self) -> frozenset[str]:
        """Kinds of 8-bit elements, "float" and "int", that its matrix units multiply as they are,
        and faster than bfloat16."""
        if self.platform == "cuda":
            has = self.compute_capability or (0, 0)
            units = _CUDA_UNITS.items()
            return frozenset(kind for kind, (first, end) in units if first <= has < end)
        if self.platform == "tpu":
            return frozenset(_TPU_UNITS.get(self.device_kind or "", ()))
        return frozenset({"float"} if self.platform == "rocm" else ())

    def lowering(self, on_one_device: bool) -> AbstractContextManager[None]:
        """The context of codecs in what is lowered for it."""
        converts = self.platform == "tpu" and "float" in self.multiplies
        return lowering(Lowering(self.platform, converts, on_one_device))

    @property
    def unsplit(self) -> str | None:
        """Why its compiler cannot be told how devices share a call; None: it can."""
        return "TPUs have no custom partitioning" if self.platform == "tpu" else None


# From which compute capability on, and up to which: Blackwell has few units for integers.
_CUDA_UNITS = {"float": ((8, 9), (1000, 0)), "int": ((8, 0), (10, 0))}
# By libtpu's bundles. What others are given, XLA makes bfloat16 or float32 of, element by element;
# E5M2 alone, which a v6e has too, is no faster there than bfloat16, nor are integers of a v4.
_TPU_UNITS = {
    "TPU v5 lite": ("int",),
    "TPU v5": ("int",),
    "TPU v6 lite": ("int",),
    "TPU7x": ("float",),
}

# jax.Device is no type to a type checker.
Device = Any


@dataclasses.dataclass(frozen=True)
class SelectionContext:
    """What a caller's contexts say of selection: in jit's cache key, and in every equation.

    Attributes:
      target: the machine, named by `use_target` or known to an equation; None: where JAX would run.
      device: that committed arrays lie on, outside `jit`.
      only: what `only_backend` names. Every call is for one device then: who names a backend takes
        it as it is with sharded arrays.
      preferred: what `prefer_backends` names.
      added: what `with_backends` adds.
    """

    target: Target | None = None
    device: Device | None = None
    only: str | None = None
    preferred: tuple[str, ...] = ()
    added: tuple[Any, ...] = ()

    @classmethod
    def capture(cls) -> "SelectionContext":
        """The context in force, with the machine that it is for."""
        return dataclasses.replace(selection(), target=current_target())

    def restore(self) -> AbstractContextManager[None]:
        """A context in which selection is what it was here."""
        return _context(self)


# None for the usual one: jit hashes it at every call.
_context: Any = jax.make_user_context(default_value=None)
_USUAL = SelectionContext()


def selection() -> SelectionContext:
    """The context of selection in force."""
    return _context.value or _USUAL


@contextlib.contextmanager
def selecting(**changes: Any) -> Iterator[None]:
    """A context of selection that differs in some attributes."""
    with _context(dataclasses.replace(selection(), **changes)):
        yield


def use_target(target: Target) -> AbstractContextManager[None]:
    """A context in which every call is for this machine, whether it is there or not."""
    return selecting(target=target)


def on_devices_of(*operands: Any) -> AbstractContextManager[None]:
    """A context for the devices of committed arrays, if all operands are such: outside `jit`."""
    # Codes that have a source are traced, and stay with it.
    leaves = jax.tree.leaves(operands, is_leaf=lambda x: getattr(x, "primal", None) is not None)
    if not leaves or any(isinstance(x, Tracer) or not isinstance(x, jax.Array) for x in leaves):
        return contextlib.nullcontext()
    devices = [min(x.devices(), key=lambda device: device.id) for x in leaves if x.committed]
    if devices:
        device, usual = devices[0], _device()
        if (device.platform, device.device_kind) != (usual.platform, usual.device_kind):
            return selecting(device=device)
    return contextlib.nullcontext()


def current_target() -> Target:
    """The machine that a call is for.

    In this order: what `use_target` names; the devices of committed arrays outside `jit`
    (`on_devices_of`); those of the mesh in context (`jax.set_mesh`, `jax.shard_map`); the device of
    `jax.default_device`; JAX's first. All of it is in jit's cache key, and known while tracing.
    Under `only_backend` it has one device.
    """
    context = selection()
    if (named := context.target) is not None:
        return named if context.only is None else dataclasses.replace(named, num_devices=1)
    device, mesh, counted, num_devices = _device(), jax.sharding.get_abstract_mesh(), True, 1
    if context.only is None:
        # JAX refuses arrays on devices outside of the mesh in context, of which jit splits
        # automatic axes: below `jax.shard_map` each device has a call of its own. Without a mesh:
        # all of the platform; of a device that is only compiled for, one.
        sizes = [size for name, size in mesh.shape.items() if name not in mesh.manual_axes]
        try:
            num_devices = jax.device_count(device.platform) if mesh.empty else math.prod(sizes)
        except RuntimeError:
            num_devices = 1
        counted = num_devices == 1 or not mesh.empty
    return dataclasses.replace(
        _described(device),
        num_devices=num_devices,
        counted=counted,
        program_devices=max(1, mesh.size),  # an empty mesh has none
    )


def is_unsplit() -> bool:
    """Whether the compiler cannot be told how devices share a call, also of a mesh for a machine
    that is not there."""
    of_mesh = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    known = None if of_mesh is None else Target(platform=of_mesh.platform).unsplit
    return bool(known or current_target().unsplit)


def of_platform(platform: str) -> Target:
    """One device of a platform, as far as this host has it."""
    try:
        return _described(jax.devices(platform)[0])
    except RuntimeError:  # a platform that is not here, of which a mesh may know the kind
        device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
        if device is None or device.platform != platform:
            return Target(platform=platform)
        return Target(platform=platform, device_kind=device.device_kind)


def _described(device: Device) -> Target:
    platform, numbers = device.platform, None
    if platform == "gpu":
        # So jax calls both kinds; the client's version says which.
        platform = "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
    capability = getattr(device, "compute_capability", None)
    if capability is not None and platform == "cuda":
        major, _, minor = str(capability).partition(".")
        numbers = (int(major), int(minor or 0))
    kind = None if platform == "cpu" else device.device_kind
    return Target(platform=platform, compute_capability=numbers, device_kind=kind)


def _device() -> Device:
    """A device like the one that jax would use."""
    if (device := selection().device) is not None:
        return device
    of_mesh = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if of_mesh is not None:
        # A mesh for a machine that is not there decides nothing; `testing.target` names one.
        with contextlib.suppress(RuntimeError):
            for device in jax.devices(of_mesh.platform):
                if device.device_kind == of_mesh.device_kind:
                    return device
    default: Any = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(default, str):
        return jax.devices(default)[0]
    return jax.devices()[0] if default is None else default


@dataclasses.dataclass(frozen=True)
class Late:
    """A module of a backend, imported when a call for the backend's platform is first asked."""

    module: str

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.module), name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offer:
    """One kind of call that a backend takes.

    Attributes:
      call: its type.
      rejects: given a call and the target, why this call cannot be taken there, e.g.
        `"needs k % 128 == 0, got k=96"`; None to accept. Decided from the description alone,
        before anything runs.
      run: given the operands and the call last, what the call asks for. MatmulCall: `(lhs, rhs,
        call)` to the product `[*batch, *m, *n]` in `call.out_dtype`; rhs may be weights that this
        backend packed for a product of these axes. RaggedCall: `(lhs, rhs, group_sizes, call)`, the
        sizes int32 `[g]` of at most all rows. QuantizeCall: `(x, random_bits, tensor_scale,
        call)` to an MXArray without a gradient link. QuantizeBothCall: likewise, with a pair of
        random bits, to a pair. DequantizeCall: `(x, call)` to values in `call.dtype`. PackCall:
        `(x, call)` to x in this backend's own layout, or to x itself. AttendCall: `(queries, keys,
        values, position, call)` to float32 like queries. CastStatisticsCall: `(x, array, call)` to
        what `reference.statistics.of_cast` gives: counts alike, sums within float32's rounding;
        subnormal values count in sums or not, as they do for the machine's arithmetic.
        RandomBitsCall: `(key, call)` to int32, by a `DerivedKey`. TransformCall: `(x, signs,
        call)` to float32, within a product's bound.
      label: what computes it, in words, where the backend's name does not say it; or a function
        of a call that it takes.
      takes_keys: whether it takes a `DerivedKey` in place of random bits or signs, if the backend
        draws them itself; else they are drawn before.
      takes_parts: whether it may compute a device's part of a call that the compiler splits.
    """

    call: type[Call]
    rejects: Callable[[Any, Target], str | None]
    run: Callable[..., Any]
    label: str | Callable[[Any], str] = ""
    takes_keys: bool = False
    takes_parts: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """One way to compute. Every backend gives the reference's codes, scales and values bit for bit,
    and products within its stated bound of the exact ones.

    Attributes:
      name: what `only_backend` and `explain` call it.
      epsilon_bound: c in `|C - exact| <= c * 2^-24 * sqrt(k) * sum |a b|` for float32 products.
      value_error: relative, of the values that it multiplies: twice that times `sum |a b|` more.
      table: what it offers, a row for each kind of call; of any other it says that it does not.
    """

    name: str
    epsilon_bound: float
    value_error: float = 0.0
    table: tuple[Offer, ...]

    @functools.cached_property
    def offers(self) -> Mapping[type[Call], Offer]:
        """The table by the kind of call."""
        return {offer.call: offer for offer in self.table}

    def rejects(self, call: Call, target: Target) -> str | None:
        """Why a call is not taken on a machine, or None."""
        offer = self.offers.get(type(call))
        if offer is None:
            return f"does not {ASKS[type(call)]}"
        return offer.rejects(call, target)

    def run(self, call: Call, *operands: Any) -> Any:
        """What a call that is not rejected asks for: see `Offer.run`."""
        return self.offers[type(call)].run(*operands, call)


@dataclasses.dataclass(frozen=True)
class _Absent:
    """A device of a machine that is not there, as far as custom partitioning asks: its place."""

    id: int
    platform: str
    process_index: int = 0
    device_kind: str = "absent"
    client: Any = None


def show_devices(ctx: Any, platform: str) -> Any:
    """A lowering rule's context with the program's devices in it; None if that knows none."""
    # Custom partitioning wants them, and JAX shows them to its own primitives alone. They go by
    # position: any that are as many will do.
    module = ctx.module_context
    number = getattr(module.axis_context, "num_devices", None)
    exported = module.lowering_parameters.for_export
    if number is None or exported:
        return None
    if module.axis_context.device_assignment:
        return ctx  # of an equation within another's lowering
    try:
        devices = tuple(jax.devices(platform)[:number])
    except RuntimeError:  # lowered for a machine that is not there
        devices = ()
    if len(devices) != number:
        devices = tuple(_Absent(id, platform) for id in range(number))
    context = dataclasses.replace(module.axis_context, device_assignment=devices)
    return ctx.replace(module_context=module.replace(axis_context=context))
