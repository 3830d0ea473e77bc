"""What every number means, in plain jnp. Backends are compared with it bit for bit."""
