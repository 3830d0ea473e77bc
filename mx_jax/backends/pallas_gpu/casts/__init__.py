"""Values to codes and scales, and codes to bfloat16: in registers, and as kernels of their own."""
