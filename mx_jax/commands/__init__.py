"""What `python -m mx_jax` does: one file a command."""
