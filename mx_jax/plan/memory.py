"""What one device keeps: parameters, gradients, the optimizer's state, and residuals."""

import dataclasses
from typing import NamedTuple

from mx_jax.formats import BlockFormat
from mx_jax.ops.experts import goes_by_row
from mx_jax.plan.mesh import Setup
from mx_jax.plan.model import Linear, Model
from mx_jax.specs import MatmulRecipe, OperandSpec, Residuals


class Remat(NamedTuple):
    """What `jax.checkpoint` around each block keeps.

    Attributes:
      operands: the operands of products, as a program without it does.
      quantized: codes and scales that the forward products take.
      inputs: what goes into the block.
    """

    operands: bool
    quantized: bool
    inputs: bool


REMATS = {
    "none": Remat(operands=True, quantized=False, inputs=False),
    "nothing_saveable": Remat(operands=False, quantized=False, inputs=True),
    "save_quantized": Remat(operands=False, quantized=True, inputs=True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device.

    Attributes:
      parameters: as stored.
      gradients: of one step, in the parameters' dtype.
      optimizer: its moments.
      residuals: what linear layers keep between the passes, or rematerialized blocks do.
    """

    parameters: float
    gradients: float
    optimizer: float
    residuals: float

    @property
    def total(self) -> float:
        """The sum."""
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
    remat, itemsize = REMATS[setup.remat], setup.dtype.itemsize
    total = 0.0
    if remat.inputs:
        tokens = setup.local_tokens / (setup.model if setup.sequence else 1)
        total += tokens * model.width * itemsize
    for linear in model.linears:
        shape = input_shape(linear, setup)
        # What arrives as codes is kept as codes.
        sent = setup.sends_codes(linear) and goes_by_row(recipe.fwd)
        primal = recipe.residuals is Residuals.PRIMAL and not sent
        if remat.operands and sent and recipe.residuals is Residuals.PRIMAL:
            assert recipe.fwd.lhs is not None
            total += stored_bytes(recipe.fwd.lhs, shape[0] * shape[1])
        elif remat.operands and primal:
            # Weights are parameters: they are there anyway.
            total += shape[0] * shape[1] * itemsize
        elif remat.operands or (remat.quantized and (linear.recomputed or not primal)):
            total += _kept(linear, setup, recipe, shape, primal=remat.operands)
    return total


def _kept(
    linear: Linear,
    setup: Setup,
    recipe: MatmulRecipe,
    shape: tuple[float, float],
    primal: bool,
) -> float:
    """Codes of both forward operands; with `primal` also the input, if it stays as it came."""
    lhs, rhs = recipe.fwd.lhs, recipe.fwd.rhs
    weight = linear.k * linear.n * setup.matrices(linear) / (setup.fsdp * setup.model)
    total = 0.0
    if lhs is not None:
        total += stored_bytes(lhs, shape[0] * shape[1]) + _mask_bytes(recipe, shape[0] * shape[1])
    elif primal:
        total += shape[0] * shape[1] * setup.dtype.itemsize
    if rhs is not None:
        total += stored_bytes(rhs, weight) + _mask_bytes(recipe, weight)
    return total


def _mask_bytes(recipe: MatmulRecipe, elements: float) -> float:
    """What says which elements were clipped, where codes are kept: a bit each."""
    kept = recipe.mask_clipped and recipe.residuals is Residuals.QUANTIZED
    return elements / 8 if kept else 0.0


def input_shape(linear: Linear, setup: Setup) -> tuple[float, float]:
    """Tokens and features of a layer's input that lie on one device."""
    tokens = setup.rows(linear)
    if linear.split == "row":
        return tokens, linear.k / setup.model
    return tokens / (setup.model if setup.sequence else 1), linear.k


def stored_bytes(spec: OperandSpec, elements: float) -> float:
    """Codes in memory, a byte each however few their bits, and scales."""
    return elements * (1 + scale_share(spec.format))


def scale_share(format: BlockFormat) -> float:
    """Bytes of scales for each element; those of whole axes are too few to count."""
    return (format.bits_per_element - format.element.bits) / 8
