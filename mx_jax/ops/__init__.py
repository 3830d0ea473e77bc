"""The operations users call. Layers above ask for the machine and for backends here, not below."""

from mx_jax.backends.select import only_backend as only_backend
from mx_jax.backends.select import prefer_backends as prefer_backends
from mx_jax.backends.target import current_target as current_target
