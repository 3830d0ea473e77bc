"""The operations users call: checks, canonical order, gradients, dispatch."""
