"""The operations users call: checks, canonical order, gradients, dispatch.

Layers above ask here, and nowhere below, for the machine and for the choice of backends.
"""

from mx_jax.backends.select import only_backend as only_backend
from mx_jax.backends.select import prefer_backends as prefer_backends
from mx_jax.backends.target import current_target as current_target
