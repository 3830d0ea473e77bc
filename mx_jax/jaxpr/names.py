"""Names of layers in programs."""

import contextlib
import dataclasses
from typing import Any

import jax

# Whether layers that differ by their names alone are parted. In jit's key.
parted: Any = jax.make_user_context(default_value=False)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class LayerName:
    """A layer's path, where equal layers are to share a trace: equal to any other but where names
    are `parted`. What jit compiled for one of them otherwise keeps that one's name.

    Attributes:
      path: parts parted by `/`.
    """

    path: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerName) and (not parted.value or self.path == other.path)

    def __hash__(self) -> int:
        return hash(LayerName)

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """A context below the layer, in the program's names."""
        return jax.named_scope(self.path)
