"""What is gathered as codes: mesh axes, and where the operands of a product lie."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from mx_jax.axes import Side
from mx_jax.sharding.movement import Movement, Part, parts_of, type_of

# What a `gather` argument may be.
GatherLike = Any


@dataclasses.dataclass(frozen=True)
class Gather:
    """Mesh axes along which operands are stored in shards, and gathered for each product as codes.

    Each shard is quantized where it lies; what moves is codes at their real width and scales, in
    the orientation that the product needs, and the gradient comes back in high precision, summed
    and scattered. Nothing is gathered without a mesh in context (`jax.set_mesh`, `jax.shard_map`).

    Attributes:
      axes: names of mesh axes, e.g. `("fsdp",)`; a single name stands for itself.
      rhs: where the right operand, the weight, lies: mesh axes of each of its axes. None: what its
        type says, on a mesh with explicit axes; in layers, what Flax's metadata say.
      lhs: likewise for the left operand; None on other meshes: it is not gathered.
      as_codes: False gathers values in place of codes, once for a product and its gradients where
        XLA keeps what it gathered: bfloat16 has 16 bits an element, MXFP8 in two orientations 16.5.

    Examples:
      >>> import jax, mx_jax
      >>> from jax.sharding import PartitionSpec as P
      >>> gather = mx_jax.sharding.Gather("fsdp", rhs=P("fsdp", "model"))
      >>> recipe = mx_jax.recipes.mxfp4().with_(gather=gather)
    """

    axes: Sequence[str]
    _: dataclasses.KW_ONLY
    rhs: PartitionSpec | None = None
    lhs: PartitionSpec | None = None
    as_codes: bool = True

    def __post_init__(self):
        axes: Any = (self.axes,) if isinstance(self.axes, str) else self.axes
        if not isinstance(axes, Sequence) or not all(isinstance(name, str) for name in axes):
            raise TypeError(
                f"Gather: axes must be names of mesh axes, got axes={self.axes!r}; e.g. 'fsdp'"
            )
        object.__setattr__(self, "axes", tuple(axes))
        for side in ("lhs", "rhs"):
            spec = getattr(self, side)
            if spec is not None:
                object.__setattr__(self, side, PartitionSpec(*spec))

    @classmethod
    def of(cls, given: GatherLike) -> "Gather | None":
        """A `Gather`, where a name or names of mesh axes stand for one.

        Raises:
          TypeError: what is neither.
        """
        return given if given is None or isinstance(given, Gather) else cls(given)

    def with_leading(self, lhs: int, rhs: int) -> "Gather":
        """The same for operands with more axes in front, which are whole."""
        specs = (
            None if spec is None else PartitionSpec(*(None,) * added, *spec)
            for spec, added in ((self.lhs, lhs), (self.rhs, rhs))
        )
        return dataclasses.replace(self, **dict(zip(("lhs", "rhs"), specs, strict=True)))

    def on_mesh(self) -> frozenset[str]:
        """The axes that operands are gathered along on the mesh in context; none without one.

        Raises:
          ValueError: axes that the mesh does not have.
        """
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            return frozenset()
        missing = [name for name in self.axes if name not in mesh.axis_names]
        if missing:
            raise ValueError(
                f"gather: the mesh in context has no axis {missing[0]!r}, got gather axes="
                f"{self.axes} and mesh axes={mesh.axis_names}; name axes of the mesh, or None"
            )
        return frozenset(self.axes)

    def movement(self, side: Side, ndim: int) -> Movement | None:
        """How an operand moves where no type says where it lies; None: it does not.

        Raises:
          ValueError: a right operand of which nobody says where it lies.
        """
        names = frozenset(name for name in self.on_mesh() if type_of(name) is not AxisType.Explicit)
        spec = self.rhs if side == "rhs" else self.lhs
        if not names or (spec is None and side == "lhs"):
            return None
        if spec is None:
            raise ValueError(
                f"gather: nobody says where {side} lies along mesh axes={sorted(names)}, which are "
                f"not explicit, got gather axes={self.axes}, rhs=None; pass Gather({self.axes}, "
                "rhs=PartitionSpec(...)), or give the layer's kernel_init to nn.with_partitioning"
            )
        if len(spec) > ndim:
            raise ValueError(
                f"gather: a spec has at most one entry for each axis, got {side}={spec} for an "
                f"operand with ndim={ndim}"
            )
        return moving(parts_of(spec, ndim), names, as_codes=self.as_codes)


def moving(stored: tuple[Part, ...], names: frozenset[str], *, as_codes: bool) -> Movement | None:
    """The movement along those of some mesh axes that an operand is sharded along."""
    gathered = names & frozenset(name for part in stored for name in part)
    if not gathered:
        return None
    return Movement(stored=stored, gathered=gathered, as_codes=as_codes)
