"""`python -m mx_jax plan`: bytes of a training step on a mesh, compared over recipes."""
