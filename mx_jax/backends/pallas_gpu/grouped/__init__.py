"""Products of rows in groups: which rows a program multiplies, and the kernels' own parts."""
