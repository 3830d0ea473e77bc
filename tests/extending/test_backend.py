"""The backend of `four_rows.py`, in force for a `with` block; nothing of mx_jax knows of it.

Places to touch: one, its data in that file (before: 6, a class with methods that are never asked,
the table, the import contract, the suite's promises and two lists of names).
"""

import jax
import jax.numpy as jnp
import pytest

import mx_jax
from mx_jax import formats
from mx_jax.backends.calls import MatmulCall, QuantizeCall
from mx_jax.backends.reference import REFERENCE
from mx_jax.backends.select import only_backend, prefer_backends, with_backends
from mx_jax.backends.target import Backend, Offer, Target
from mx_jax.testing import backend_suite
from mx_jax.testing.cases import MatmulCase, QuantizeCase
from tests.extending.four_rows import FOUR_ROWS

SMALL = QuantizeCase(format=formats.MXFP4, shape=(4, 64))
LARGE = QuantizeCase(format=formats.MXFP4, shape=(8, 64))


# One function: what is added is part of jit's cache key.
CAST = jax.jit(lambda x: mx_jax.quantize(x, "mxfp4").codes)


def program(rows: int) -> str:
    return CAST.lower(jnp.ones((rows, 64))).as_text()


def test_it_comes_first_while_it_is_there():
    with with_backends(FOUR_ROWS):
        assert "optimization_barrier" in program(4)
        assert "optimization_barrier" not in program(8)
    assert "optimization_barrier" not in program(4)


def test_it_is_explained():
    with with_backends(FOUR_ROWS), mx_jax.testing.target("tpu"):
        accepted, left = (
            str(mx_jax.inspect.explain(mx_jax.cast, jnp.ones((rows, 64)), "mxfp4"))
            for rows in (4, 8)
        )
    assert "blocks of 32 along axis -1 -> four_rows\n" in accepted
    assert "  not four_rows: needs 4 rows, got shape=(8, 64)" in left
    # What is not in its table is not offered, and one place says so.
    assert "  not four_rows, xla, xla_scaled" in accepted and ": does not dequantize" in accepted


def test_it_has_a_name_like_any_other():
    with with_backends(FOUR_ROWS):
        with (
            only_backend("four_rows"),
            pytest.raises(ValueError, match="four_rows: needs 4 rows, got shape="),
        ):
            mx_jax.quantize(jnp.ones((8, 64)), "mxfp4")
        with prefer_backends("reference"):
            assert "optimization_barrier" not in program(4)
    with pytest.raises(
        ValueError, match="only_backend: unknown backend name='four_rows'; known: xla"
    ):
        only_backend("four_rows")
    for backends in ((FOUR_ROWS, FOUR_ROWS), (FOUR_ROWS, REFERENCE)):
        with pytest.raises(ValueError, match="each backend needs a name of its own, got names="):
            with_backends(*backends)


def test_the_suite_checks_it():
    def promise(call, target):
        return isinstance(call, QuantizeCall) and call.shape[0] == 4

    cpu = Target(platform="cpu")
    assert backend_suite.check_answer(FOUR_ROWS, promise, SMALL.call, cpu)
    assert not backend_suite.check_answer(FOUR_ROWS, promise, LARGE.call, cpu)
    product = MatmulCase(lhs=formats.MXFP4, rhs=formats.MXFP4).call
    assert isinstance(product, MatmulCall)
    assert not backend_suite.check_answer(FOUR_ROWS, promise, product, cpu)
    backend_suite.check_quantize(FOUR_ROWS, SMALL)


def test_one_that_takes_no_keys_gets_random_bits():
    """Keys are for those that say so."""
    dtypes = []

    def run(x, bits, tensor_scale, call):
        dtypes.append(bits.dtype)
        return REFERENCE.run(call, x, bits, tensor_scale)

    offer = Offer(call=QuantizeCall, rejects=lambda call, target: None, run=run)
    backend = Backend(name="own", epsilon_bound=2.0, table=(offer,))
    x, key = jnp.ones((8, 32)), jax.random.key(7)
    cast = lambda x, key: mx_jax.quantize(x, "mxfp4", rounding="stochastic", key=key).codes  # noqa: E731
    with with_backends(backend), mx_jax.testing.target("cpu"):
        codes = jax.jit(cast)(x, key)
    assert dtypes == [jnp.int32]
    assert (codes == jax.jit(cast)(x, key)).all()
