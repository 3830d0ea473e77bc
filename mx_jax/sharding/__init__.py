"""Where quantized tensors lie on a mesh, and how they get to where they are multiplied."""

from mx_jax.sharding.exchange import Dispatched as Dispatched
from mx_jax.sharding.exchange import all_to_all as all_to_all
from mx_jax.sharding.exchange import dispatch as dispatch
from mx_jax.sharding.exchange import ppermute as ppermute
from mx_jax.sharding.movement import Gather as Gather
from mx_jax.sharding.movement import Specs as Specs
from mx_jax.sharding.movement import device_put as device_put
from mx_jax.sharding.movement import spec_for as spec_for
