"""Where bits and scales lie: what kernels read, and packed weights made of it."""
