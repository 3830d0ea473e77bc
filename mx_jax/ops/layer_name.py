"""The name of a layer that does not know where in its model it is."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax

from mx_jax.ops.moments import watching
from mx_jax.ops.tags import within


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class LayerName:
    """A layer's path, where equal layers are to share a trace: equal to any other while nobody
    watches. What jit compiled for one of them then keeps that one's name.

    Attributes:
      path: parts parted by `/`.
    """

    path: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerName) and (not watching.value or self.path == other.path)

    def __hash__(self) -> int:
        return hash(LayerName)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """A context below the layer, in the program's names too."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(jax.named_scope(self.path))
            if watching.value:
                stack.enter_context(within(tuple(self.path.split("/"))))
            yield
