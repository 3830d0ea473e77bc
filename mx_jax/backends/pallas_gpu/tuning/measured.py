"""Tiles that are measured for a product, and those that a measurement chose."""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from mx_jax.backends.calls import Call, MatmulCall, RaggedCall
from mx_jax.backends.pallas_gpu.architecture import Architecture, architecture_of
from mx_jax.backends.pallas_gpu.kernels import Kernel
from mx_jax.backends.pallas_gpu.layouts.scaled import ScaledOperand
from mx_jax.backends.pallas_gpu.layouts.storage import storage
from mx_jax.backends.pallas_gpu.tuning.plan import choose
from mx_jax.backends.pallas_gpu.tuning.space import candidates, keeps_busy
from mx_jax.backends.pallas_gpu.tuning.tiles import Tiles, Tuning
from mx_jax.backends.pallas_gpu.tuning.tuned import Measured, measured
from mx_jax.backends.target import Config, Target

# Weights that are decoded for XLA's product: for no fewer rows than fill a tensor core's tile.
_DECODE_FIRST: Config = (("crossover", 1),)
_MIN_ROWS_DECODED = 64
# Weights are padded to whole multiples.
_PAD = 128


def configured(kernel: str, config: Config) -> AbstractContextManager[None]:
    """A context in which a kernel takes these tiles, and no others; it enters jit's cache key.

    Args:
      kernel: its name.
      config: fields of `Tiles`, or of `Tuning` the crossover; none for its own.
    """
    facts = dict(config)

    def tuning(own: Tuning) -> Tuning:
        crossover = facts.get("crossover", math.inf)
        sizes: dict[str, Any] = {name: at for name, at in facts.items() if name != "crossover"}
        tiles = ((math.inf, Tiles(**sizes)),) if sizes else own.tiles
        return Tuning(tiles=tiles, crossover=crossover)

    return measured(Measured(kernel=kernel, config=config, tuning=tuning))


def configs(
    call: Call, target: Target, architecture: Architecture | None = None
) -> Iterator[Config]:
    """What else a product's kernel may do, the nearest to what the table says first.

    Sums over the rows of groups have tiles of their own, of one shape.

    Args:
      call: that the backend does not reject.
      target: the machine.
      architecture: instead of the target's.
    """
    row = architecture or architecture_of(target.compute_capability)
    if not isinstance(call, MatmulCall | RaggedCall) or row is None:
        return
    if isinstance(call, RaggedCall) and call.contracts_rows:
        return
    kernel = row.kernel(call.lhs.format, call.rhs.format)
    size = _Size.of(call, kernel)
    own = size.tiles(row, kernel)
    # Of those that come to the same, one.
    wanted = {
        size.tiles(row, kernel, own): own for own in candidates(row, kernel, size.bits, size.m)
    }
    wanted.pop(own, None)
    n = size.batch * size.n
    busy = [tiles for tiles in wanted if keeps_busy(row, kernel, tiles, m=size.m, n=n)]
    busy = busy or list(wanted)
    busy.sort(key=lambda tiles: (_distance(tiles, own), dataclasses.astuple(tiles)))
    others = [_config_of(wanted[tiles]) for tiles in busy]
    decodes = isinstance(call, MatmulCall) and kernel.layout is not ScaledOperand
    decodes = decodes and size.m >= _MIN_ROWS_DECODED
    yield from others[:1]
    yield from [_DECODE_FIRST] * decodes
    yield from others[1:]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Size:
    """A product as tiles see it.

    Attributes:
      batch: products; the groups of rows.
      m: rows of activations, or of the left operand; of a group on average.
      n: rows of weights, padded, and k likewise.
      bits: of a code.
    """

    batch: int = 1
    m: int
    n: int
    k: int
    bits: int

    @classmethod
    def of(cls, call: MatmulCall | RaggedCall, kernel: Kernel) -> "_Size":
        activations, weights = call.lhs, call.rhs
        if weights.format is None:
            activations, weights = weights, activations
        assert weights.format is not None
        element = weights.format.element
        bits = element.bits if kernel.layout is ScaledOperand else storage(element).bits
        k = math.prod(weights.shape[axis] for axis in weights.axes.contracting)
        n, k = (-(-size // _PAD) * _PAD for size in (weights.rows, k))
        if isinstance(call, MatmulCall):
            return cls(m=activations.rows, n=n, k=k, bits=bits)
        groups = max(1, min(call.num_groups, call.lhs.rows))
        return cls(batch=groups, m=-(-call.lhs.rows // groups), n=n, k=k, bits=bits)

    def tiles(self, row: Architecture, kernel: Kernel, wanted: Tiles | None = None) -> Tiles:
        """What a product of this size does with the tiles that are wanted, or by the table."""
        config = () if wanted is None else _config_of(wanted)
        with configured(kernel.name, config):
            return choose(row, kernel, self.bits, batch=self.batch, m=self.m, n=self.n, k=self.k)


def _config_of(tiles: Tiles) -> Config:
    return tuple(sorted(dataclasses.asdict(tiles).items()))


def _distance(left: Tiles, right: Tiles) -> float:
    """Sum of the ratios of their sizes, in octaves; one for programs that stay, however many."""
    stays = bool(left.programs) != bool(right.programs)
    left, right = (dataclasses.replace(tiles, programs=0) for tiles in (left, right))
    pairs = zip(dataclasses.astuple(left), dataclasses.astuple(right), strict=True)
    return stays + sum(abs(math.log2(max(a, 1) / max(b, 1))) for a, b in pairs)
