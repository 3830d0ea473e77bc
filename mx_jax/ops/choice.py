"""The public door to the choice of backends, which layers above ops do not look at."""

from mx_jax.backends.select import only_backend as only_backend
from mx_jax.backends.select import prefer_backends as prefer_backends
