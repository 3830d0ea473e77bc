"""What was measured of kernels, on which device: frozen rows that switch kernels on.

A kernel behind the reference is not asked, until a row says that on this device it is right and
faster than what would compute the call without it. `work` says what a row is about, `rows` what it
says and how files hold it, `sources` which rows count here.
"""

from mx_jax.backends.evidence.rows import Row as Row
from mx_jax.backends.evidence.sources import in_force as in_force
from mx_jax.backends.evidence.sources import use as use
from mx_jax.backends.evidence.work import Work as Work
