"""How others store quantized weights: one row for each layout.

Sources: the published checkpoints and the code that writes them; docs/checkpoint.md has the list.
"""

import dataclasses

from mx_jax.checkpoint.layout import Layout
from mx_jax.formats import (
    E4M3,
    F32,
    FLOAT8_BLOCKWISE_2D_E4M3,
    FLOAT8_BLOCKWISE_2D_E8M0,
    MXFP4,
    MXFP6_E2M3,
    MXFP8_E4M3,
    NVFP4,
    WHOLE,
    BlockFormat,
)


def _compressed(format: str) -> tuple[tuple[str, str], ...]:
    return ("quant_method", "compressed-tensors"), ("format", format)


def _modelopt(algorithm: str) -> tuple[tuple[str, str], ...]:
    return ("quant_method", "modelopt"), ("quant_algo", algorithm)


def _fp_quant(format: BlockFormat, name: str) -> Layout:
    """Codes of a rotated weight, under a scale of the tensor that divides: 1, 3 or 10 by custom."""
    return Layout(
        name=f"fp-quant-{name}",
        format=format,
        codes=".qweight",
        scales=".scales",
        tensor_scale=".weight_global_scale",
        divides=True,
        rotation=".forward_hadamard_matrix",
        padded=True,
        exponents=format.scale.is_float32,
        configs=((("quant_method", "fp_quant"), ("forward_dtype", name)),),
    )


# MXFP4 under a scale of the whole tensor, which no format has: both are one float32 number.
_FP4_FLOAT32 = dataclasses.replace(MXFP4, name="mxfp4_float32_scale", scale=F32)
_FP8_ROWS = BlockFormat(name="float8_channelwise_e4m3", element=E4M3, scale=F32, block=(1, WHOLE))

LAYOUTS: tuple[Layout, ...] = (
    Layout(
        name="gpt-oss",
        format=MXFP4,
        codes="_blocks",
        scales="_scales",
        weight="",
        split=True,
        configs=((("quant_method", "mxfp4"),),),
    ),
    Layout(
        name="gpt-oss-original",
        format=MXFP4,
        codes=".blocks",
        scales=".scales",
        weight="",
        split=True,
    ),
    Layout(
        name="mxfp4-pack-quantized",
        format=MXFP4,
        codes=".weight_packed",
        scales=".weight_scale",
        configs=(_compressed("mxfp4-pack-quantized"),),
    ),
    Layout(
        name="mxfp6-pack-quantized",
        format=MXFP6_E2M3,
        codes=".weight_packed",
        scales=".weight_scale",
        configs=(_compressed("mxfp6-pack-quantized"),),
    ),
    Layout(
        name="nvfp4-pack-quantized",
        format=NVFP4,
        codes=".weight_packed",
        scales=".weight_scale",
        tensor_scale=".weight_global_scale",
        scales_dtypes=("F8_E4M3",),
        divides=True,
        configs=(_compressed("nvfp4-pack-quantized"),),
    ),
    Layout(
        name="mxfp8-quantized",
        format=MXFP8_E4M3,
        codes=".weight",
        scales=".weight_scale",
        codes_dtype="F8_E4M3",
        scales_dtypes=("U8", "F8_E8M0"),
        configs=(_compressed("mxfp8-quantized"), _modelopt("MXFP8")),
    ),
    Layout(
        name="float-quantized",
        format=_FP8_ROWS,
        codes=".weight",
        scales=".weight_scale",
        codes_dtype="F8_E4M3",
        scales_dtypes=("F32", "BF16"),
        configs=(_compressed("float-quantized"),),
    ),
    Layout(
        name="modelopt-nvfp4",
        format=NVFP4,
        codes=".weight",
        scales=".weight_scale",
        tensor_scale=".weight_scale_2",
        scale_shape=(),
        scales_dtypes=("F8_E4M3",),
        configs=(_modelopt("NVFP4"), _modelopt("W4A16_NVFP4")),
    ),
    Layout(
        name="modelopt-mxfp4",
        format=MXFP4,
        codes=".weight",
        scales=".weight_scale",
        configs=(
            _modelopt("MXFP4"),
            # As ModelOpt 0.47 spells it itself.
            _modelopt("mxfp4"),
            _modelopt("W4A8_MXFP4_FP8"),
            (("quant_method", "quark"),),
        ),
    ),
    Layout(
        name="quark-mxfp4",
        format=MXFP4,
        codes=".weight",
        scales=".weight_quantizer.scale",
        configs=((("quant_method", "quark"),),),
    ),
    Layout(
        # The float8 layers that it leaves as DeepSeek has them, scales renamed.
        name="quark-float8",
        format=FLOAT8_BLOCKWISE_2D_E4M3,
        codes=".weight",
        scales=".weight_scale",
        codes_dtype="F8_E4M3",
        scales_dtypes=("F32",),
        configs=((("quant_method", "quark"),),),
    ),
    Layout(
        name="deepseek-v3",
        format=FLOAT8_BLOCKWISE_2D_E4M3,
        codes=".weight",
        scales=".weight_scale_inv",
        codes_dtype="F8_E4M3",
        # DeepSeek's own are float32; others store theirs in bfloat16.
        scales_dtypes=("F32", "BF16"),
        configs=((("quant_method", "fp8"),),),
    ),
    Layout(
        name="deepseek-v3.1",
        format=FLOAT8_BLOCKWISE_2D_E8M0,
        codes=".weight",
        scales=".weight_scale_inv",
        codes_dtype="F8_E4M3",
        scales_dtypes=("F8_E8M0",),
        configs=((("quant_method", "fp8"),),),
    ),
    Layout(
        # V4 before its last training, with experts in float8 too.
        name="deepseek-v4-base",
        format=FLOAT8_BLOCKWISE_2D_E4M3,
        codes=".weight",
        scales=".scale",
        codes_dtype="F8_E4M3",
        scales_dtypes=("F32",),
        configs=((("quant_method", "fp8"),),),
    ),
    Layout(
        name="deepseek-v4",
        format=FLOAT8_BLOCKWISE_2D_E8M0,
        codes=".weight",
        scales=".scale",
        codes_dtype="F8_E4M3",
        scales_dtypes=("F8_E8M0",),
        configs=((("quant_method", "fp8"),),),
    ),
    Layout(
        # Its I8 is packed FP4, not INT8.
        name="deepseek-v4-experts",
        format=MXFP4,
        codes=".weight",
        scales=".scale",
        codes_dtype="I8",
        scales_dtypes=("F8_E8M0",),
        configs=((("quant_method", "fp8"),),),
    ),
    _fp_quant(_FP4_FLOAT32, "mxfp4"),
    _fp_quant(NVFP4, "nvfp4"),
)


def named(name: str) -> Layout:
    """The row of `LAYOUTS` of that name; ValueError lists the names."""
    for layout in LAYOUTS:
        if layout.name == name:
            return layout
    raise ValueError(
        f"checkpoint: unknown layout={name!r}; known: {', '.join(row.name for row in LAYOUTS)}"
    )
