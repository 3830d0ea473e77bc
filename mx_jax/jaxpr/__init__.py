"""Programs as JAX traces them: read by one walker and run anew by one rewriter.

`read` lists the equations of a program, those in loops and calls too; `regions` has a row for each
primitive that runs programs; `rewrite` runs a program with some equations computed another way.
Nothing else in mx_jax looks into a jaxpr.
"""
