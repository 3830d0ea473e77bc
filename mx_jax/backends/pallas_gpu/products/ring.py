"""Slots of shared memory that one warp fills in turn while warpgroups read those before.

Device code; imports Mosaic GPU, so only kernels import this file.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

# Its declared types differ between versions of JAX, and none fits its own use.
plgpu: Any = mosaic_gpu


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
    """How many slots there are, and who waits for whom.

    A barrier pair for each slot: `filled` by every copy into it, `freed` by every reader of it.

    Attributes:
      slots: at most 32, since Mosaic keeps the phases of so many barriers.
      copies: into one slot.
      readers: warpgroups that read a slot.
    """

    slots: int
    copies: int
    readers: int

    def barriers(self) -> tuple[Any, Any]:
        """Scratch types of `filled` and `freed`."""
        return (
            plgpu.Barrier(num_arrivals=self.copies, num_barriers=self.slots),
            plgpu.Barrier(num_arrivals=self.readers, num_barriers=self.slots),
        )

    def after(self, slot: Any, steps: int = 1) -> Any:
        """The slot some steps later, at most a round: without division, for any number of slots."""
        later = slot + steps
        return jnp.where(later >= self.slots, later - self.slots, later)

    def fill(self, step: Any, slot: Any, freed: Any, copy: Callable[[Any], None]) -> Any:
        """Call `copy(slot)` once its readers are done with it, and give the next slot.

        Args:
          step: how many slots were filled before.
          slot: the one to fill.
          freed: barriers.
          copy: begins the copies, which arrive at the slot's barrier of `filled`.
        """

        @pl.when(step >= self.slots)
        def _():
            plgpu.barrier_wait(freed.at[slot])

        copy(slot)
        return self.after(slot)

    def drain(self, steps: Any, slot: Any, freed: Any) -> None:
        """Wait for all readers, so that no barrier is left in the middle of a phase.

        Args:
          steps: how many slots were filled.
          slot: the one that would be filled next.
          freed: barriers.
        """

        def wait(_: Any, slot: Any) -> Any:
            plgpu.barrier_wait(freed.at[slot])
            return self.after(slot)

        loop(lax.min(steps, jnp.int32(self.slots)), wait, jnp.where(steps < self.slots, 0, slot))


def on_one_warp(run: Callable[[], None]) -> None:
    """Let the first warp of a warpgroup do what needs no more threads."""

    @plgpu.warp_map
    def _(warp):
        pl.when(warp == 0)(run)


def loop(count: Any, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """`carry = body(i, carry)` for i from 0, counted in 32 bits whatever JAX's default is."""
    return lax.fori_loop(jnp.int32(0), jnp.int32(count), body, carry)
