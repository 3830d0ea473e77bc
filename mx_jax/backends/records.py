"""What selection decided while functions were traced, for whoever explains it."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

from mx_jax.backends.calls import Call
from mx_jax.backends.evidence import Row
from mx_jax.backends.target import Offer, Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """One question to the backends, and their answer.

    Attributes:
      call: the work.
      target: the machine.
      backend: name of the first that accepts; None if all that are asked reject.
      rejections: (name, reason) of those tried before.
      on_request: (name, why it is not asked) of those that would accept if they were named.
      how: what the one that accepts says of how it computes, in words; may be empty.
      evidence: the measurement that the backend is asked for; None if it is asked anyway.
    """

    call: Call
    target: Target
    backend: str | None
    rejections: tuple[tuple[str, str], ...]
    on_request: tuple[tuple[str, str], ...]
    how: str = ""
    evidence: Row | None = None


# In the name stack of what computes an entry of a recorder, with the entry's index behind.
MARK = "mx_jax.entry_"


@dataclasses.dataclass(frozen=True)
class Marked:
    """What an offer runs, under a name that the jaxpr carries.

    Attributes:
      run: the offer's own.
      name: of the scope.
    """

    run: Callable[..., Any]
    name: str

    def __call__(self, *operands: Any) -> Any:
        """As `Offer.run`."""
        with jax.named_scope(self.name):
            return self.run(*operands)


@dataclasses.dataclass(eq=False)
class Recorder:
    """What a trace met, in order; equal only to itself.

    Attributes:
      entries: selections, and remarks on what is done besides.
      marks: whether what is selected runs under a name that says which entry it was.
    """

    entries: list[Selection | str] = dataclasses.field(default_factory=list)
    marks: bool = False

    def marked(self, offer: Offer) -> Offer:
        """The offer of the newest entry, under its name where the recorder marks."""
        if not self.marks:
            return offer
        name = f"{MARK}{len(self.entries) - 1}"
        return dataclasses.replace(offer, run=Marked(offer.run, name))

    @property
    def selections(self) -> list[Selection]:
        """The selections alone."""
        return [entry for entry in self.entries if isinstance(entry, Selection)]


# `active.value` is the recorder to tell, or None.
# In jit's cache key, and no recorder equals another: so nothing that is traced for one is answered
# from an earlier trace, and no later call from this one.
active: Any = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def recording(*, marks: bool = False) -> Iterator[Recorder]:
    """A context in which every selection is recorded; in nested ones, by the innermost.

    It records what is traced: of a function under `jit`, the first of several equal calls. With
    `marks` the jaxpr says which of its equations compute which entry: see `MARK`.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> from mx_jax.backends.records import recording
      >>> with recording() as recorder:
      ...     shape = jax.eval_shape(lambda x: mx_jax.cast(x, "mxfp4"), jnp.ones(32))
      >>> [type(selection.call).__name__ for selection in recorder.selections]
      ['QuantizeCall', 'DequantizeCall']
    """
    recorder = Recorder(marks=marks)
    with active(recorder):
        yield recorder
