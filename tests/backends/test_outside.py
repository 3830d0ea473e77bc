"""A backend registered from outside: plain data, in force for a `with` block.

It is selected, explained, run by users' functions and checked by the shared suite. Places to touch:
one, the data itself. It was six: the class, its methods that are never asked, the table, the import
contract, the list of promises, and the command that lists backends.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import formats
from mx_jax.backends.base import Backend, MatmulCall, Offer, QuantizeCall, Target
from mx_jax.backends.reference import REFERENCE
from mx_jax.backends.select import only_backend, prefer_backends, with_backends
from mx_jax.inspect import environment
from mx_jax.testing import backend_suite
from mx_jax.testing.cases import MatmulCase, QuantizeCase

SMALL = QuantizeCase(format=formats.MXFP4, shape=(4, 64))
LARGE = QuantizeCase(format=formats.MXFP4, shape=(8, 64))


def needs_four_rows(call: QuantizeCall, target: Target) -> str | None:
    return None if call.shape[0] == 4 else f"needs 4 rows, got shape={call.shape}"


def behind_a_barrier(x, random_bits, tensor_scale, call):
    """The reference's cast; the barrier is what tells it from the reference's own."""
    return REFERENCE.run(call, jax.lax.optimization_barrier(x), random_bits, tensor_scale)


TOY = Backend(
    name="toy",
    epsilon_bound=2.0,
    table=(Offer(call=QuantizeCall, rejects=needs_four_rows, run=behind_a_barrier),),
)


def program(rows: int) -> str:
    return mx_jax_cast.lower(jnp.ones((rows, 64))).as_text()


@jax.jit
def mx_jax_cast(x):
    return mx_jax.quantize(x, "mxfp4").codes


def test_it_is_asked_first_and_run_while_it_is_there():
    with with_backends(TOY):
        assert "optimization_barrier" in program(4)
        assert "optimization_barrier" not in program(8)
    # Also after it: the addition is part of jit's cache key.
    assert "optimization_barrier" not in program(4)


def test_it_is_explained():
    with with_backends(TOY), mx_jax.testing.target("tpu"):
        taken, left = (
            mx_jax.inspect.explain_call(mx_jax.cast, jnp.ones((rows, 64)), "mxfp4")
            for rows in (4, 8)
        )
    assert "blocks of 32 along axis -1 -> toy\n" in taken
    assert "  not toy: needs 4 rows, got shape=(8, 64)" in left
    # What is not in its table is not offered, and one place says so.
    assert "  not toy: dequantizes nothing" in taken


def test_it_is_listed():
    with with_backends(TOY):
        names = [backend["name"] for backend in environment.describe()["backends"]]
    assert names[:2] == ["toy", "xla"]


def test_it_has_a_name_like_any_other():
    with with_backends(TOY):
        with only_backend("toy"), pytest.raises(ValueError, match="toy: needs 4 rows, got shape="):
            mx_jax.quantize(jnp.ones((8, 64)), "mxfp4")
        with prefer_backends("reference"):
            assert "optimization_barrier" not in program(4)
    with pytest.raises(ValueError, match="only_backend: unknown backend name='toy'; known: xla"):
        only_backend("toy")
    for backends in ((TOY, TOY), (TOY, REFERENCE)):
        with pytest.raises(ValueError, match="each backend needs a name of its own, got names="):
            with_backends(*backends)


def test_the_suite_checks_it():
    def promise(call, target):
        return isinstance(call, QuantizeCall) and call.shape[0] == 4

    cpu = backend_suite.TARGETS[0]
    assert backend_suite.check_answer(TOY, promise, SMALL.call, cpu)
    assert not backend_suite.check_answer(TOY, promise, LARGE.call, cpu)
    product = MatmulCase(lhs=formats.MXFP4, rhs=formats.MXFP4).call
    assert isinstance(product, MatmulCall)
    assert not backend_suite.check_answer(TOY, promise, product, cpu)
    backend_suite.check_quantize(TOY, SMALL)


def test_it_is_a_value():
    again = Backend(name="toy", epsilon_bound=2.0, table=TOY.table)
    assert again == TOY and hash(again) == hash(TOY)
    assert np.unique([hash(TOY), hash(REFERENCE)]).size == 2
