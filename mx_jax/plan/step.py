"""A training step: the model's linear layers, the mesh, and the bytes that move and are kept."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from mx_jax.axes import Side
from mx_jax.ops.ragged_dot import goes_by_row
from mx_jax.specs import MatmulRecipe, OperandSpec, Residuals

Split = Literal["column", "row"]

# Of sizes that nobody gave.
_MULTIPLE = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear:
    """A linear layer `[tokens, k] -> [tokens, n]`."""

    name: str  # what tables call it
    k: int  # features that go in
    n: int  # features that come out
    # Which axis of its weight the mesh axis `model` shards: `"column"` n, `"row"` k; `fsdp`
    # shards the other.
    split: Split
    # Whether a block that is rematerialized computes it again: not what only the residual
    # stream reads.
    recomputed: bool = True
    experts: int = 1  # how many such layers there are, of which a token goes through some
    experts_per_token: int = 1  # how many

    @property
    def is_routed(self) -> bool:
        return self.experts > 1

    @property
    def params(self) -> int:
        return self.k * self.n * self.experts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A transformer."""

    params: int  # of all of it
    layers: int  # number of blocks
    width: int  # features of the residual stream
    linears: tuple[Linear, ...]  # the linear layers of one block, all of which follow the recipe
    assumed: tuple[str, ...] = ()  # what was not said, in words

    def __post_init__(self):
        if self.other_params < 0:
            raise ValueError(
                f"plan: the linear layers have {self.linear_params:,} parameters, more than "
                f"params={self.params:,}; check --params, --layers, --width and --hidden"
            )

    @property
    def linear_params(self) -> int:
        """Parameters of the linear layers in all blocks."""
        return self.layers * sum(linear.params for linear in self.linears)

    @property
    def other_params(self) -> int:
        """Embedding, head, norms: what no recipe quantizes."""
        return self.params - self.linear_params


def transformer(
    params: float,
    layers: int,
    *,
    width: int | None = None,
    hidden: int | None = None,
    kv_width: int | None = None,
    vocabulary: int = 0,
    experts: int = 1,
    experts_per_token: int = 1,
) -> Model:
    """A decoder with a gated MLP, or a mixture of such experts: `qkv`, `out`, `gate_up` and `down`.

    Without a width it is `sqrt(params / (12 layers))`, without `hidden` what the parameters leave
    for it, both rounded to multiples of 256; rows of a vocabulary count twice, for the head too.

    Examples:
      >>> from mx_jax.plan.step import transformer
      >>> llama = transformer(70.6e9, 80, width=8192, kv_width=1024, vocabulary=128256)
      >>> [(own.name, own.k, own.n) for own in llama.linears][2:]
      [('gate_up', 8192, 57344), ('down', 28672, 8192)]
    """
    routed: Any = {"experts": experts, "experts_per_token": experts_per_token}
    if experts_per_token > experts:
        raise ValueError(
            f"plan: a token goes through some of the experts, got experts_per_token="
            f"{experts_per_token}, experts={experts}; pass --experts"
        )
    assumed = []
    if width is None:
        width = max(1, round(math.sqrt(params / (12 * layers)) / _MULTIPLE)) * _MULTIPLE
        assumed.append(f"width={width:,}, such that a block has its share of the parameters")
    if kv_width is None:
        kv_width = width
        assumed.append(f"kv_width={kv_width:,}, as many heads of keys as of queries")
    if hidden is None:
        left = (params - 2 * vocabulary * width) / layers - 2 * width * (width + kv_width)
        hidden = round(left / (3 * width * experts) / _MULTIPLE) * _MULTIPLE
        if hidden <= 0:
            raise ValueError(
                f"plan: nothing is left for the MLP, got params={params:,.0f}, layers={layers}, "
                f"width={width}, kv_width={kv_width}, vocabulary={vocabulary}; pass another width"
            )
        whose = "a gated MLP" if experts == 1 else f"{experts} gated MLPs"
        assumed.append(f"hidden={hidden:,}, what the parameters leave for {whose}")
    linears = (
        Linear(name="qkv", k=width, n=width + 2 * kv_width, split="column"),
        Linear(name="out", k=width, n=width, split="row"),
        Linear(name="gate_up", k=width, n=2 * hidden, split="column", **routed),
        # The weights that a router gives experts have a gradient, which reads what experts give.
        Linear(name="down", k=hidden, n=width, split="row", recomputed=experts > 1, **routed),
    )
    # A width that was rounded may need a little more than was given.
    most = max(round(params), layers * sum(linear.params for linear in linears))
    params = most if most < 1.02 * params else round(params)
    return Model(params=params, layers=layers, width=width, linears=linears, assumed=tuple(assumed))


# What each axis does; any of them may be missing.
AXES = ("data", "fsdp", "expert", "model", "pipe")
# How many microbatches a stage keeps residuals of, of its stages and of all of them.
SCHEDULES: dict[str, Callable[[int, int], int]] = {
    "gpipe": lambda stages, microbatches: microbatches,
    "1f1b": min,
}
_BFLOAT16, _FLOAT32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """A mesh, and what every recipe shares on it."""

    data: int = 1  # devices along the axis that only shards tokens
    fsdp: int = 1  # devices along the axis that shards tokens, weights and the optimizer's state
    expert: int = 1  # devices along the axis that shards tokens and experts, but no other weights
    model: int = 1  # devices along the axis that shards features
    pipe: int = 1  # stages of a pipeline, each with its part of the blocks
    microbatches: int = 1  # that a step's tokens go through the stages in
    schedule: str = "gpipe"  # a row of `SCHEDULES`
    tokens: int  # of one step, of all devices together
    # Of activations, of values that are gathered and of sums between devices.
    dtype: np.dtype = _BFLOAT16
    param_dtype: np.dtype = _FLOAT32  # in which parameters are stored
    moments: int = 2  # how many float32 numbers the optimizer keeps a parameter
    # Mesh axes along which operands move as codes; along others, as values.
    codes: frozenset[str] = frozenset({"fsdp", "expert", "model"})
    # Whether the tokens between two linear layers are sharded along `model` too.
    sequence: bool = False
    remat: str = "none"  # one of `REMATS`

    def __post_init__(self):
        if self.microbatches < 1 or (self.microbatches > 1 and self.pipe == 1):
            raise ValueError(
                f"plan: microbatches go through the stages of a pipeline, got microbatches="
                f"{self.microbatches} with pipe={self.pipe}; name pipe in --mesh, or leave them out"
            )
        groups = self.data * self.fsdp * self.expert * self.microbatches
        if self.tokens % groups:
            raise ValueError(
                f"plan: tokens are sharded along data, fsdp and expert, got tokens={self.tokens:,} "
                f"for data={self.data}, fsdp={self.fsdp}, expert={self.expert} and microbatches="
                f"{self.microbatches}; pass a multiple of {groups}"
            )

    @property
    def devices(self) -> int:
        return math.prod(getattr(self, name) for name in AXES)

    @property
    def local_tokens(self) -> int:
        """Tokens that one device, or those along `model` together, work on."""
        return self.tokens // (self.data * self.fsdp * self.expert)

    @property
    def tokens_between(self) -> float:
        """Tokens of one device between two blocks."""
        return self.local_tokens / (self.model if self.sequence else 1)

    @property
    def in_flight(self) -> "Setup":
        """The same with the tokens that a stage keeps residuals of."""
        kept = SCHEDULES[self.schedule](self.pipe, self.microbatches)
        return dataclasses.replace(
            self, tokens=self.tokens * kept // self.microbatches, microbatches=1
        )

    def rows(self, linear: Linear) -> int:
        """Rows that a layer multiplies there: each token as often as it has experts."""
        return self.local_tokens * linear.experts_per_token

    def matrices(self, linear: Linear) -> int:
        """Experts of a layer that devices along `expert` have each; 1 for other layers."""
        return linear.experts // self.expert if linear.is_routed else 1

    def check(self, model: Model) -> None:
        """Raise ValueError for blocks or experts that the mesh does not divide."""
        if model.layers % self.pipe:
            raise ValueError(
                f"plan: each stage of a pipeline has as many blocks, got layers={model.layers} for "
                f"pipe={self.pipe}; pass a number of stages that divides them"
            )
        routed = [linear for linear in model.linears if linear.is_routed]
        if self.expert > 1 and not routed:
            raise ValueError(
                f"plan: the axis expert shards experts, of which the model has none, got expert="
                f"{self.expert}; pass --experts, or use fsdp"
            )
        for linear in routed:
            if linear.experts % self.expert:
                raise ValueError(
                    f"plan: devices along expert have an equal part of the experts, got experts="
                    f"{linear.experts} with expert={self.expert}; pass a size that divides them"
                )
            if self.sequence and self.model > 1:
                raise ValueError(
                    "plan: rows that lie by expert are not gathered, whose groups would be torn "
                    f"apart, got --sequence-parallel with experts={linear.experts}, model="
                    f"{self.model}; leave it out, so that devices along model have the same tokens"
                )

    def weight_shards(self, linear: Linear) -> tuple[int, int]:
        """In how many parts the axes k and n of a weight are stored."""
        return (self.fsdp, self.model) if linear.split == "column" else (self.model, self.fsdp)


def parse_mesh(text: str) -> dict[str, int]:
    """`"data=4,fsdp=8"` as sizes."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name not in AXES or name in sizes or not size.isdecimal() or not int(size):
            raise ValueError(
                f"plan: mesh must name axes of {', '.join(AXES)} once with their sizes, got "
                f"mesh={text!r}; e.g. data=4,fsdp=64,model=8"
            )
        sizes[name] = int(size)
    return sizes


# Bytes that a device receives, in parts of the whole tensor, of n devices in a ring.
COLLECTIVES = {
    "all-gather": 1,
    "reduce-scatter": 1,
    "all-reduce": 2,
    "all-to-all": 1,
    "collective-permute": 1,
}


@dataclasses.dataclass(frozen=True)
class Movement:
    """One collective of every linear layer."""

    axis: str  # the mesh axis
    collective: str  # a row of `COLLECTIVES`
    tensor: str  # what moves
    # The pass; what is forward happens again in a rematerialized block.
    during: Literal["forward", "backward"]
    # The operands of products that it gathers, as (product, side) of a recipe: one
    # collective each where they move as codes, one for all as values. Sums have none.
    operands: tuple[tuple[str, Side], ...] = ()
    split: Split | None = None  # the layers that need it; None: all
    routed: bool | None = None  # whether layers of experts need it, or others; None: all
    # How often it happens in a step: for each block; for each block and microbatch; or for
    # each stage of a pipeline.
    each: Literal["block", "microbatch", "stage"] = "block"

    def is_of(self, linear: Linear) -> bool:
        if self.each == "stage":
            return False
        return self.split in (None, linear.split) and self.routed in (None, linear.is_routed)


# Weights are gathered for each pass, in the orientation that its product contracts. Rows go to
# their experts, and products back; other weights are the same along that axis.
DATA_AND_EXPERT_PARALLEL = (
    Movement("fsdp", "all-gather", "weight", "forward", (("fwd", "rhs"),), each="microbatch"),
    Movement("fsdp", "all-gather", "weight", "backward", (("dlhs", "rhs"),), each="microbatch"),
    Movement("fsdp", "reduce-scatter", "weight gradient", "backward", each="microbatch"),
    Movement("data", "all-reduce", "weight gradient", "backward"),
    Movement("expert", "all-to-all", "input", "forward", (("fwd", "lhs"),), "column", True),
    Movement("expert", "all-to-all", "output", "forward", split="row", routed=True),
    Movement("expert", "all-to-all", "output gradient", "backward", split="row", routed=True),
    Movement("expert", "all-to-all", "input gradient", "backward", split="column", routed=True),
    Movement("expert", "all-reduce", "weight gradient", "backward", routed=False),
)
# Activations are whole along `model` between layers: only sums of partial products move.
TENSOR_PARALLEL = (
    Movement("model", "all-reduce", "output", "forward", split="row"),
    Movement("model", "all-reduce", "input gradient", "backward", split="column"),
)
_COTANGENT: tuple[tuple[str, Side], ...] = (("dlhs", "lhs"), ("drhs", "lhs"))
# Tokens are sharded along `model` between layers, and gathered for each product.
SEQUENCE_PARALLEL = (
    Movement("model", "all-gather", "input", "forward", (("fwd", "lhs"),), "column"),
    Movement("model", "reduce-scatter", "output", "forward", split="row"),
    Movement("model", "all-gather", "output gradient", "backward", _COTANGENT, "row"),
    Movement("model", "all-gather", "input", "backward", (("drhs", "rhs"),), "column"),
    Movement("model", "reduce-scatter", "input gradient", "backward", split="column"),
)
_PERMUTE = "collective-permute"
# From stage to stage. Cotangents go back as they are, whatever the blocks' input came as.
PIPELINE = (
    Movement("pipe", _PERMUTE, "block input", "forward", (("fwd", "lhs"),), each="stage"),
    Movement("pipe", _PERMUTE, "block input gradient", "backward", each="stage"),
)


def movements(setup: Setup) -> tuple[Movement, ...]:
    """What moves on a mesh, along axes with more than one device."""
    along_model = SEQUENCE_PARALLEL if setup.sequence else TENSOR_PARALLEL
    every = (*DATA_AND_EXPERT_PARALLEL, *along_model, *PIPELINE)
    return tuple(own for own in every if getattr(setup, own.axis) > 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that one device receives in a step by one kind of movement."""

    movement: Movement  # which
    bytes: float  # of all layers
    as_codes: tuple[str, ...]  # layers of a block whose operands move as codes
    as_values: tuple[str, ...]  # those whose operands move as values


def traffic(model: Model, setup: Setup, recipe: MatmulRecipe) -> tuple[Traffic, ...]:
    """What a device receives in a step, movement by movement."""
    found = []
    for own in movements(setup):
        linears, blocks = list(filter(own.is_of, model.linears)), model.layers // setup.pipe
        if own.each == "stage":
            # Between stages tokens move as they do before a layer as wide as the model.
            stages = Linear(name="stages", k=model.width, n=model.width, split="column")
            linears, blocks = [stages], 1
        total, as_codes, as_values = 0.0, [], []
        for linear in linears:
            moved, coded = moved_bytes(own, linear, setup, recipe)
            times = 2 if is_repeated(own, linear, setup, recipe) else 1
            often = setup.microbatches if own.each == "microbatch" else 1
            total += often * times * blocks * moved
            (as_codes if coded else as_values).append(linear.name)
        if own.tensor.startswith("weight"):
            # Embedding and head are gathered and summed like weights, always as values, and once:
            # they are before and behind the pipeline.
            shards = setup.model * setup.pipe * (1 if own.axis == "fsdp" else setup.fsdp)
            total += model.other_params / shards * setup.dtype.itemsize
        # A device receives what it lacks; what one device sends to one other comes whole.
        size = getattr(setup, own.axis)
        lacking = 1.0 if own.collective == _PERMUTE else (size - 1) / size
        total *= COLLECTIVES[own.collective] * lacking
        row = Traffic(
            movement=own, bytes=total, as_codes=tuple(as_codes), as_values=tuple(as_values)
        )
        found.append(row)
    return tuple(found)


def is_repeated(own: Movement, linear: Linear, setup: Setup, recipe: MatmulRecipe) -> bool:
    """Whether it happens once more in the backward pass, in a block that is rematerialized."""
    in_block = own.during == "forward" and own.each != "stage"
    if not in_block or setup.remat == "none" or not linear.recomputed:
        return False
    if own.collective != "all-gather" or moved_bytes(own, linear, setup, recipe)[1]:
        return True
    # Values that the backward pass gathers anyway are gathered once for both.
    return not any(
        (own.axis, own.collective, own.tensor) == (other.axis, other.collective, other.tensor)
        and not moved_bytes(other, linear, setup, recipe)[1]
        for other in movements(setup)
        if other.during == "backward"
    )


def moved_bytes(
    own: Movement, linear: Linear, setup: Setup, recipe: MatmulRecipe
) -> tuple[float, bool]:
    """Bytes of a tensor, or of the part that devices along the axis share; whether of codes."""
    shape = _shape(own, linear, setup)
    count = setup.matrices(linear) if own.tensor.startswith("weight") else 1
    values = count * math.prod(shape) * setup.dtype.itemsize
    if own.axis not in setup.codes or not own.operands:
        return values, False
    if own.axis == "expert" and not goes_by_row(recipe.fwd):
        return values, False
    total = 0.0
    for product, side in own.operands:
        spec: OperandSpec | None = getattr(getattr(recipe, product), side)
        if spec is None:
            return values, False
        # Sizes of blocks along both axes of a weight `[k, n]` or of `[tokens, features]`, None of
        # a whole axis.
        blocks = [size if isinstance(size, int) else None for size in spec.format.block]
        if product == "drhs" or (own.tensor == "weight" and product == "fwd"):
            blocks.reverse()
        if linear.is_routed and not _whole_blocks(own, linear, setup, blocks):
            return values, False
        # Codes at their real width, and scales.
        pairs = zip(shape, blocks, strict=True)
        scales = math.prod(1 if size is None else -(-length // size) for length, size in pairs)
        bits = math.prod(shape) * spec.format.element.bits + scales * spec.format.scale.bits
        total += count * bits / 8
    return total, True


def _shape(own: Movement, linear: Linear, setup: Setup) -> tuple[float, float]:
    """What is whole after gathering, or before it is scattered or sent on, on one device."""
    features = linear.k if own.tensor.startswith("input") else linear.n
    if own.each == "stage":
        return setup.tokens_between, features
    if not own.tensor.startswith("weight"):
        return setup.rows(linear), features
    parts = list(setup.weight_shards(linear))
    if own.axis == "fsdp":
        parts[0 if linear.split == "column" else 1] = 1
    return -(-linear.k // parts[0]), -(-linear.n // parts[1])


def _whole_blocks(
    own: Movement, linear: Linear, setup: Setup, blocks: Sequence[int | None]
) -> bool:
    """Whether no block straddles two shards: else `ragged_dot` gathers values."""
    if own.tensor == "weight":
        lengths, parts = (linear.k, linear.n), setup.weight_shards(linear)
    else:
        lengths, parts = _shape(own, linear, setup), (setup.model, 1)
    return all(
        count == 1 or size is None or (length % count == 0 and length // count % size == 0)
        for length, count, size in zip(lengths, parts, blocks, strict=True)
    )


# What `jax.checkpoint` around each block keeps besides what goes into the block; "none": there is
# no such thing, and the operands of products are kept.
REMATS = ("none", "nothing_saveable", "save_quantized")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device."""

    parameters: float  # as stored
    gradients: float  # of one step, in the parameters' dtype
    optimizer: float  # its moments
    residuals: float  # what linear layers keep between the passes, or rematerialized blocks do

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.residuals


def memory(model: Model, setup: Setup, recipe: MatmulRecipe) -> Memory:
    """What a device keeps of a model on a mesh."""
    routed = sum(linear.params for linear in model.linears if linear.is_routed) * model.layers
    shards = setup.fsdp * setup.model * setup.pipe
    own = (model.params - routed + routed / setup.expert) / shards
    return Memory(
        parameters=own * setup.param_dtype.itemsize,
        gradients=own * setup.param_dtype.itemsize,
        optimizer=own * setup.moments * 4,
        residuals=model.layers / setup.pipe * block_residuals(model, setup.in_flight, recipe),
    )


def block_residuals(model: Model, setup: Setup, recipe: MatmulRecipe) -> float:
    """Bytes that one block keeps on a device from its forward to its backward pass."""

    def stored(spec: OperandSpec, elements: float) -> float:
        """Codes in memory, a byte each however few their bits, and scales but of whole axes."""
        return elements * (1 + (spec.format.bits_per_element - spec.format.element.bits) / 8)

    itemsize, is_whole = setup.dtype.itemsize, setup.remat == "none"
    total = 0.0 if is_whole else setup.tokens_between * model.width * itemsize
    is_primal = recipe.residuals is Residuals.PRIMAL
    lhs, rhs = recipe.fwd.lhs, recipe.fwd.rhs
    for linear in model.linears:
        is_shared = linear.split == "row" or setup.sequence
        elements = setup.rows(linear) * linear.k / (setup.model if is_shared else 1)
        # What arrives as codes is kept as codes: the input of a layer of experts.
        routed = setup.expert > 1 and linear.is_routed and linear.split == "column"
        sent = routed and "expert" in setup.codes and goes_by_row(recipe.fwd)
        if is_whole and is_primal:
            # Weights are parameters: they are there anyway.
            assert lhs is not None or not sent
            total += stored(lhs, elements) if lhs and sent else elements * itemsize
            continue
        again = setup.remat == "save_quantized" and (linear.recomputed or sent or not is_primal)
        if not is_whole and not again:
            continue
        # Codes of both forward operands; the input may stay as it came.
        weight = linear.k * linear.n * setup.matrices(linear) / (setup.fsdp * setup.model)
        if lhs is not None:
            total += stored(lhs, elements)
        elif is_whole:
            total += elements * itemsize
        if rhs is not None:
            total += stored(rhs, weight)
    return total
