"""Programs as JAX traces them: read by one walker and run anew by one rewriter.

`read` makes a call a program, and lists its equations, those in loops too; `regions` has a row for
each primitive that runs programs; `rewrite` runs a program with some equations computed another
way. Nothing else in mx_jax looks into a jaxpr.
"""
