"""Measuring arithmetic: one core, and no page faults.

A process of its own is pinned before JAX starts its threads, and glibc backs large arrays
with huge pages: a fresh 64 MiB array then costs some 500 page faults instead of 16384, whose price
would hide everything else.
"""

import functools
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks import held

# Read by glibc when a process starts; other C libraries and systems take no notice.
HUGE_PAGES = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")


def pin() -> None:
    """Keep this process on the last of its cores; the first ones serve interrupts.

    Where the library is held to AVX2, XLA is too, as on a machine that has no more.
    """
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    held.hold()


def on_one_core(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)` in a new process on one core, with huge pages where it can have them.

    XLA and PyTorch size their thread pools by the cores that are left, so both run on one thread.

    Args:
      function: importable by name.
      *arguments: whatever can be pickled.

    Raises:
      SystemExit: where a process cannot be pinned.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise SystemExit("one core: this system cannot pin a process")
    variable, value = HUGE_PAGES
    before = os.environ.get(variable)
    os.environ[variable] = value
    try:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context, initializer=pin) as pool:
            return pool.submit(functools.partial(function, *arguments)).result()
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
