"""The door to the choice of backends, and of the machine, which layers above ops do not look at."""

from mx_jax.backends.select import only_backend as only_backend
from mx_jax.backends.select import prefer_backends as prefer_backends
from mx_jax.backends.target import current_target as current_target
