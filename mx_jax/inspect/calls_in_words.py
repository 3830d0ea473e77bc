"""Calls and machines in words, for people who ask what selection was asked."""

from mx_jax.backends.calls import (
    AttendCall,
    Call,
    CastStatisticsCall,
    DequantizeCall,
    MatmulCall,
    OperandType,
    PackCall,
    QuantizeBothCall,
    QuantizeCall,
    RaggedCall,
    RandomBitsCall,
    TransformCall,
)
from mx_jax.backends.target import Target


def machine_text(target: Target) -> str:
    """A machine as selection sees it."""
    capability = target.compute_capability
    shown = "" if capability is None else f", compute_capability={capability}"
    number = target.num_devices if target.counted else f"1 to {target.num_devices}"
    return f"on platform={target.platform}{shown}, num_devices={number}"


def _operand(own: OperandType) -> str:
    return f"{own.dtype if own.format is None else own.format.name} {list(own.shape)}"


def work_text(call: Call) -> str:
    """A call in words; shapes and axes as the arrays lie."""
    match call:
        case MatmulCall():
            lhs, rhs = (_operand(own) for _, own in call.sides)
            left, right = (list(own.axes.contracting) for _, own in call.sides)
            return f"product {lhs} x {rhs} over axes {left} and {right}, to {call.out_dtype}"
        case RaggedCall():
            lhs, rhs = _operand(call.lhs), _operand(call.rhs)
            return f"ragged product {lhs} x {rhs}, {call.num_groups} groups, to {call.out_dtype}"
        case QuantizeCall():
            how = f"{call.format.name} ({call.scale_rule.name}, {call.rounding.name})"
            blocks = " and ".join(f"{size} along axis {axis}" for axis, size in call.blocks)
            return f"cast {call.dtype} {list(call.shape)} to {how} in blocks of {blocks}"
        case QuantizeBothCall():
            return f"{work_text(call.first)}; with it {work_text(call.second)}"
        case DequantizeCall():
            return f"dequantize {call.format.name} {list(call.shape)} to {call.dtype}"
        case PackCall():
            axes = list(call.weights.axes.contracting)
            return f"pack {_operand(call.weights)} for axes {axes}"
        case CastStatisticsCall():
            return f"statistics of a cast of {list(call.shape)} to {call.format.name}"
        case RandomBitsCall():
            return f"random bits {list(call.shape)}, {call.text}"
        case TransformCall():
            what = "Hadamard transform" if call.length is None else "inverse Hadamard transform"
            return f"{what} of {call.dtype} {list(call.shape)}"
        case AttendCall():
            held = call.dtypes[1] if call.format is None else call.format.name
            return f"attention of {list(call.queries)} over {list(call.keys)}, {held}"
