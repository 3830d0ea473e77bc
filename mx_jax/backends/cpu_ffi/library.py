"""Finding, checking and registering the compiled handlers of the CPU backend.

`pip install` builds the library from `custom_calls/`. Nothing is registered before it is known to
fit: JAX refuses to start with a handler that was built against newer headers than those of JAX.
"""

import ctypes
import dataclasses
import functools
import importlib.util
import logging
import os
import platform
import re
import sys
import threading
from pathlib import Path

import jax

# A path; or "none", to run as if nothing had been built.
LIBRARY_VARIABLE = "MX_JAX_CPU_LIBRARY"
ISA_VARIABLE = "MX_JAX_CPU_ISA"

# What `custom_calls/common/library.h` calls kInterface: what handlers take and give.
INTERFACE = 9

# What `custom_calls/common/isas.h` calls them, from least to most: a machine that has one has those
# before it, but for avx2_vnni, which some with AVX-512 lack.
_X86_ISAS = ("portable", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16")
_ARM_ISAS = ("portable", "dotprod")
ISAS = _ARM_ISAS if platform.machine() in ("aarch64", "arm64") else _X86_ISAS

_FILE = "native.abi3.so"
_NOT_BUILT = "not built: with a C++ compiler, pip install -v . builds it, or shows why not"
_LEFT_OUT = f"left out: {LIBRARY_VARIABLE}=none"

_lock = threading.Lock()
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Library:
    """A library whose handlers are registered."""

    path: Path
    isa: str  # the instruction set that runs, one of `ISAS`
    detected_isa: str  # the best that this machine has
    targets: frozenset[str]  # names that `jax.ffi.ffi_call` takes


class _Target(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("handler", ctypes.c_void_p)]


class _Description(ctypes.Structure):
    """`mx::Library` of `custom_calls/common/library.h`."""

    _fields_ = [
        ("interface", ctypes.c_int32),
        ("api_major", ctypes.c_int32),
        ("api_minor", ctypes.c_int32),
        ("isa_override_is_valid", ctypes.c_int32),
        ("isa", ctypes.c_char_p),
        ("detected_isa", ctypes.c_char_p),
        ("num_targets", ctypes.c_int64),
        ("targets", ctypes.POINTER(_Target)),
    ]


def load() -> Library | str:
    """The library with its handlers registered, or why there is none. Does its work once."""
    with _lock:
        return _load()


@functools.cache
def _load() -> Library | str:
    path = find()
    if path is None:
        return _LEFT_OUT if os.environ.get(LIBRARY_VARIABLE) else _NOT_BUILT
    return register(path)


def register(path: Path) -> Library | str:
    """Register the handlers of a file, unless they do not fit; says why not."""
    try:
        describe = ctypes.CDLL(str(path)).mx_jax_cpu_library
    except (OSError, AttributeError) as error:
        return f"cannot be loaded: {error}; build it again"
    describe.restype = ctypes.POINTER(_Description)
    description = describe().contents
    reason = misfit(
        description.interface, (description.api_major, description.api_minor), runtime_api_version()
    )
    if reason is not None:
        return reason
    isa, detected = description.isa.decode(), description.detected_isa.decode()
    if not description.isa_override_is_valid:
        return (
            f"{ISA_VARIABLE}={os.environ.get(ISA_VARIABLE)} is unknown or not on this machine, "
            f"which has {detected}; known, from least to most: {', '.join(ISAS)}"
        )
    names: set[str] = set()
    for target in description.targets[: description.num_targets]:
        pointer = ctypes.cast(target.handler, ctypes.CFUNCTYPE(ctypes.c_void_p))
        names.add(target.name.decode())
        jax.ffi.register_ffi_target(
            target.name.decode(), jax.ffi.pycapsule(pointer), platform="cpu"
        )
    return Library(path=path, isa=isa, detected_isa=detected, targets=frozenset(names))


@functools.cache
def say_once(reason: str) -> None:
    """Log that plain JAX stands in for the library, unless a user wants that."""
    # pip hides what a build prints, so the first call is where a failed one is noticed.
    if reason != _LEFT_OUT:
        _logger.warning(
            "mx_jax: casts and products run in plain JAX, several times slower than in the C++ "
            "library, which is not used: %s. `python -m mx_jax env` says what is here; "
            "%s=none leaves it out without a word",
            reason,
            LIBRARY_VARIABLE,
        )


def find() -> Path | None:
    """The library's file: what the environment names, what was installed, or `build/` here."""
    # A checkout on the path shadows an installed package, whose library serves it too, if it fits.
    named = os.environ.get(LIBRARY_VARIABLE)
    if named:
        return None if named == "none" else Path(named)
    # Its place alone is of use: it is no Python module.
    spec = importlib.util.find_spec(f"{__package__}.native")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin)
    inside = Path(*__name__.split(".")[:-1], _FILE)
    places = (*(Path(p) / inside for p in sys.path), Path(__file__).parents[3] / "build" / _FILE)
    return next((place for place in places if place.is_file()), None)


def misfit(interface: int, built: tuple[int, int], runtime: tuple[int, int] | None) -> str | None:
    """Why a library of this interface and these FFI headers must not be registered, or None."""
    if interface != INTERFACE:
        return f"built from other sources (interface {interface}, not {INTERFACE}); build it again"
    if runtime is None:
        return "jaxlib does not say which FFI version it has: its headers are missing"
    if built[0] != runtime[0] or built[1] > runtime[1]:
        wanted, has = (".".join(map(str, version)) for version in (built, runtime))
        return f"built for XLA FFI {wanted}, but this jaxlib has {has}; build it again with it"
    return None


def runtime_api_version() -> tuple[int, int] | None:
    """(major, minor) of the FFI that the installed jaxlib speaks, from the headers it carries."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    try:
        text = header.read_text()
    except OSError:
        return None
    matches = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    major, minor = (match and int(match[1]) for match in matches)
    return None if major is None or minor is None else (major, minor)
