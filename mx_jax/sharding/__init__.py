"""Where quantized tensors lie on a mesh, and how they get to where they are multiplied."""

from mx_jax.sharding.gather import Gather as Gather
