"""Which tiles a product takes, and which others are worth measuring."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax

from mx_jax.backends.calls import Call, MatmulCall, RaggedCall
from mx_jax.backends.pallas_gpu.architecture import Architecture, Kernel, architecture_of
from mx_jax.backends.pallas_gpu.layouts import PAD_K, PAD_N, storage
from mx_jax.backends.pallas_gpu.tiles import Tiles, Tuning
from mx_jax.backends.target import Config, Target

# A pipeline shorter than this has no steady state.
_MIN_STEPS = 4
# Weights that are decoded for XLA's product: for no fewer rows than fill a tensor core's tile.
_DECODE_FIRST: Config = (("crossover", 1),)
_MIN_ROWS_DECODED = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What a measurement chose for one product.

    Attributes:
      kernel: name of the one that it is about.
      config: what it chose.
      tuning: the same, given what the kernel would do without; follows from the others.
    """

    kernel: str
    config: Config
    tuning: Callable[[Tuning], Tuning] = dataclasses.field(compare=False)


# In jit's cache key: what was traced for some tiles is not reused for others.
_measured = jax.make_user_context(default_value=None)


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

    return _measured(Measured(kernel=kernel, config=config, tuning=tuning))


def tuned(kernel: Kernel, code_bits: int) -> Tuning:
    """Tiles of a kernel: what was measured for the product that is traced, else its own."""
    own, chosen = kernel.tuning_of(code_bits), _measured.value
    return own if chosen is None or chosen.kernel != kernel.name else chosen.tuning(own)


def choose(
    architecture: Architecture,
    kernel: Kernel,
    code_bits: int,
    *,
    batch: int,
    m: int,
    n: int,
    k: int,
) -> Tiles:
    """The table's tiles, shared by as many programs as still help.

    Args:
      architecture: the machine.
      kernel: one of its own.
      code_bits: 4, 6 or 8.
      batch: number of products.
      m: rows of activations.
      n: rows of weights.
      k: contracted length.

    Returns:
      Tiles. The entry's splits are an upper bound: few programs are split until they fill the
      machine, none into very few steps.

    Raises:
      ValueError: if none fit: the row's memory is smaller than its kernel can do with.
    """
    entry = next(tiles for limit, tiles in tuned(kernel, code_bits).tiles if m <= limit)
    n, k = n + -n % PAD_N, k + -k % PAD_K

    def fits(tiles: Tiles) -> bool:
        whole = tiles.n <= n if kernel.clips else n % tiles.n == k % tiles.k == 0
        return whole and architecture.possible(kernel, code_bits, tiles)

    tiles = next(filter(fits, _smaller(entry)), None)
    if tiles is None:
        raise ValueError(
            f"pallas_gpu: no tiles of {kernel} for {code_bits} bits fit {architecture}: n={n}, "
            f"k={k}, shared_memory={architecture.shared_memory}, nor any smaller than {entry}"
        )
    programs = batch * -(-m // tiles.m) * -(-n // tiles.n)
    idle, most = architecture.at_once(kernel) // programs, -(-k // tiles.k) // _MIN_STEPS
    return dataclasses.replace(tiles, splits=max(1, min(tiles.splits, idle, most)))


def _smaller(tiles: Tiles) -> Iterator[Tiles]:
    """Tiles, and what stands in for them where they do not divide an operand or do not fit."""
    shapes = [tiles, dataclasses.replace(tiles, n=128)]
    for m, n in itertools.product((tiles.m, tiles.m // 2, tiles.m // 4, 16), (tiles.n, 128)):
        stages = min(tiles.stages, 4)
        shapes.append(dataclasses.replace(tiles, k=128, m=m, n=n, stages=stages))
    for shape in shapes:
        for stages in range(shape.stages, min(shape.stages, 2) - 1, -1):
            yield dataclasses.replace(shape, stages=stages)


# Others, to be measured -------------------------------------------------------------------------


def candidates(
    architecture: Architecture, kernel: Kernel, code_bits: int, rows: int
) -> list[Tiles]:
    """Tiles worth measuring for a number of rows: of each shape the deepest pipeline that fits.

    Those of fewer rows only where memory has no room for as many.
    """
    m, found = min(128, max(kernel.min_rows, 1 << (rows - 1).bit_length())), []
    while not found and m >= kernel.min_rows:
        for n, k in itertools.product(kernel.widths, (128, 256, 512)):
            depths = (Tiles(m=m, n=n, k=k, stages=depth) for depth in range(8, 1, -1))
            fitting = (own for own in depths if architecture.possible(kernel, code_bits, own))
            for tiles in itertools.islice(fitting, 1):
                found += [dataclasses.replace(tiles, splits=splits) for splits in (1, 2, 4, 8, 16)]
        m //= 2
    return found


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
    bits, sizes = _sizes(call, kernel)

    def chosen(config: Config) -> Tiles:
        with configured(kernel.name, config):
            return choose(row, kernel, bits, **sizes)

    own = chosen(())
    # Of those that come to the same, one.
    wanted = {chosen(_config_of(each)): each for each in candidates(row, kernel, bits, sizes["m"])}
    wanted.pop(own, None)
    nearest = sorted(wanted, key=lambda tiles: (_distance(tiles, own), dataclasses.astuple(tiles)))
    others = [_config_of(wanted[tiles]) for tiles in nearest]
    decodes = isinstance(call, MatmulCall) and kernel.decodes and sizes["m"] >= _MIN_ROWS_DECODED
    yield from [*others[:1], *[_DECODE_FIRST] * decodes, *others[1:]]


def _sizes(call: MatmulCall | RaggedCall, kernel: Kernel) -> tuple[int, dict[str, int]]:
    """Bits of a code, and a product's sizes as tiles see them: of a group on average."""
    activations, weights = call.lhs, call.rhs
    if weights.format is None:
        activations, weights = weights, activations
    assert weights.format is not None
    element = weights.format.element
    groups = max(1, min(call.num_groups, call.lhs.rows)) if isinstance(call, RaggedCall) else 1
    return storage(element).bits if kernel.decodes else element.bits, {
        "batch": groups,
        "m": -(-activations.rows // groups),
        "n": weights.rows,
        "k": math.prod(weights.shape[axis] for axis in weights.axes.contracting),
    }


def _config_of(tiles: Tiles) -> Config:
    return tuple(sorted(dataclasses.asdict(tiles).items()))


def _distance(left: Tiles, right: Tiles) -> float:
    """Sum of the ratios of their sizes, in octaves."""
    pairs = zip(dataclasses.astuple(left), dataclasses.astuple(right), strict=True)
    return sum(abs(math.log2(a / b)) for a, b in pairs)
