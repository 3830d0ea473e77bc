"""Products: which kernel takes one, how operands reach it; kernels are named after instructions."""
