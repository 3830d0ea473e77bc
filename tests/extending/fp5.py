"""An element format that neither mx_jax nor ml_dtypes has, and MX blocks of it; nothing more."""

from mx_jax.formats import E8M0, BlockFormat, ElementFormat

FP5 = ElementFormat(name="e2m2", exponent_bits=2, mantissa_bits=2, bias=1)
MXFP5 = BlockFormat(name="mxfp5", element=FP5, scale=E8M0)
