"""`python -m mx_jax gpu`: check and time kernels on this machine's GPU, and write evidence rows."""
