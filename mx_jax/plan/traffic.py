"""The bytes that devices receive in a step, movement by movement."""

import dataclasses
import math

from mx_jax.axes import Side
from mx_jax.formats import BlockFormat
from mx_jax.ops.experts import goes_by_row
from mx_jax.plan.mesh import Setup
from mx_jax.plan.model import Linear, Model
from mx_jax.plan.movements import Movement, Tensor, movements, received
from mx_jax.specs import MatmulRecipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that one device receives in a step by one kind of movement.

    Attributes:
      movement: which.
      bytes: of all layers.
      as_codes: layers of a block whose operands move as codes.
      as_values: those whose operands move as values.
    """

    movement: Movement
    bytes: float
    as_codes: tuple[str, ...]
    as_values: tuple[str, ...]


def traffic(model: Model, setup: Setup, recipe: MatmulRecipe) -> tuple[Traffic, ...]:
    """What a device receives in a step, movement by movement."""
    return tuple(_traffic(own, model, setup, recipe) for own in movements(setup))


def _traffic(own: Movement, model: Model, setup: Setup, recipe: MatmulRecipe) -> Traffic:
    if own.each == "stage":
        return _between_stages(own, model, setup, recipe)
    size, blocks = getattr(setup, own.axis), model.layers // setup.pipe
    share = received(own, size)
    often = setup.microbatches if own.each == "microbatch" else 1
    total, as_codes, as_values = 0.0, [], []
    for linear in model.linears:
        if not own.is_of(linear):
            continue
        moved, coded = moved_bytes(own, linear, setup, recipe)
        times = 2 if is_repeated(own, linear, setup, recipe) else 1
        total += often * times * blocks * moved
        (as_codes if coded else as_values).append(linear.name)
    if own.tensor.startswith("weight"):
        # Embedding and head are gathered and summed like weights, always as values, and once: they
        # lie before and behind the pipeline.
        shards = setup.model * setup.pipe * (1 if own.axis == "fsdp" else setup.fsdp)
        total += model.other_params / shards * setup.dtype.itemsize
    return Traffic(
        movement=own, bytes=total * share, as_codes=tuple(as_codes), as_values=tuple(as_values)
    )


def _between_stages(own: Movement, model: Model, setup: Setup, recipe: MatmulRecipe) -> Traffic:
    """What a stage amid others receives: the tokens of all microbatches, as wide as the model."""
    tokens = setup.local_tokens / (setup.model if setup.sequence else 1)
    total, is_coded = tokens * model.width * setup.dtype.itemsize, False
    format = _format(recipe, own.operands[0]) if own.operands else None
    if format is not None and own.axis in setup.codes:
        blocks = _blocks(format, own.tensor, own.operands[0])
        total, is_coded = quantized_bytes(format, (round(tokens), model.width), blocks), True
    stages = ("stages",)
    return Traffic(
        movement=own,
        bytes=total * received(own, setup.pipe),
        as_codes=stages if is_coded else (),
        as_values=() if is_coded else stages,
    )


def is_repeated(own: Movement, linear: Linear, setup: Setup, recipe: MatmulRecipe) -> bool:
    """Whether it happens once more in the backward pass, in a block that is rematerialized.

    Values that the backward pass gathers anyway are gathered once for both.
    """
    if own.during != "forward" or setup.remat == "none" or not linear.recomputed:
        return False
    if own.collective != "all-gather" or moved_bytes(own, linear, setup, recipe)[1]:
        return True
    backward = dataclasses.replace(own, during="backward")
    alike = (
        other
        for other in movements(setup)
        if dataclasses.replace(other, operands=own.operands) == backward
    )
    return all(moved_bytes(other, linear, setup, recipe)[1] for other in alike)


def moved_bytes(
    own: Movement, linear: Linear, setup: Setup, recipe: MatmulRecipe
) -> tuple[float, bool]:
    """Bytes of the whole tensor, or of the part that devices along the axis share, and whether they
    are codes."""
    shape = _shape(own, linear, setup)
    formats = [_format(recipe, operand) for operand in own.operands]
    count = setup.matrices(linear) if own.tensor.startswith("weight") else 1
    values = count * math.prod(shape) * setup.dtype.itemsize
    if own.axis not in setup.codes or not formats:
        return values, False
    if own.axis == "expert" and not goes_by_row(recipe.fwd):
        return values, False
    total = 0.0
    for format, operand in zip(formats, own.operands, strict=True):
        blocks = None if format is None else _blocks(format, own.tensor, operand)
        if format is None or blocks is None or not _whole_blocks(own, linear, setup, blocks):
            return values, False
        total += count * quantized_bytes(format, shape, blocks)
    return min((total, True), (values, False))


def quantized_bytes(
    format: BlockFormat, shape: tuple[int, int], blocks: tuple[int | None, int | None]
) -> float:
    """Codes at their real width, and scales. Blocks of None hold a whole axis."""
    scales = (1 if size is None else -(-length // size) for length, size in _pairs(shape, blocks))
    return (math.prod(shape) * format.element.bits + math.prod(scales) * format.scale.bits) / 8


def _pairs(shape: tuple[int, int], blocks: tuple[int | None, int | None]) -> zip:
    return zip(shape, blocks, strict=True)


def _format(recipe: MatmulRecipe, operand: tuple[str, Side]) -> BlockFormat | None:
    product, side = operand
    spec = getattr(getattr(recipe, product), side)
    return None if spec is None else spec.format


def _blocks(
    format: BlockFormat, tensor: Tensor, operand: tuple[str, Side]
) -> tuple[int | None, int | None]:
    """Sizes of blocks along both axes of a weight `[k, n]` or of activations `[tokens, features]`.

    `fwd` contracts k, `dlhs` n and `drhs` the tokens.
    """
    kept, contracting = (size if isinstance(size, int) else None for size in format.block)
    product, _ = operand
    first = product == "drhs" or (tensor == "weight" and product == "fwd")
    return (contracting, kept) if first else (kept, contracting)


def _shape(own: Movement, linear: Linear, setup: Setup) -> tuple[int, int]:
    """What is whole after gathering, or before it is scattered, on one device."""
    features = linear.k if own.tensor.startswith("input") else linear.n
    if not own.tensor.startswith("weight"):
        return setup.rows(linear), features
    parts = list(setup.weight_shards(linear))
    if own.axis == "fsdp":
        parts[0 if linear.split == "column" else 1] = 1
    return -(-linear.k // parts[0]), -(-linear.n // parts[1])


def _whole_blocks(
    own: Movement, linear: Linear, setup: Setup, blocks: tuple[int | None, int | None]
) -> bool:
    """Whether no block straddles two shards."""
    if own.tensor == "weight":
        lengths, parts = (linear.k, linear.n), setup.weight_shards(linear)
    else:
        lengths, parts = _shape(own, linear, setup), (setup.model, 1)
    return all(
        count == 1 or size is None or (length % count == 0 and length // count % size == 0)
        for length, count, size in zip(lengths, parts, blocks, strict=True)
    )
