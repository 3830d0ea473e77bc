"""Programs saved by `jax.export`: the custom calls in them, and the handlers where they are loaded.

Importing this module registers the handlers, so that a saved program finds them in a process that
has only imported `mx_jax`. Nothing of JAX starts by that.
"""

from mx_jax.backends.cpu_ffi import library


def export_targets() -> tuple[str, ...]:
    """Names of the custom calls that a program exported for CPUs or GPUs may have.

    `jax.export` refuses custom calls that nobody has promised to keep as they are. These are kept
    within a release: load a program with the version of `mx_jax` that saved it, and with the C++
    library. On GPUs products of float8 have one of XLA's own, which says how codes lie in memory.

    Returns:
      Names in order; XLA's own alone where the C++ library is not built.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> allowed = [
      ...     jax.export.DisabledSafetyCheck.custom_call(name) for name in mx_jax.export_targets()
      ... ]
      >>> w = mx_jax.quantize(jnp.ones((64, 8)), "mxfp4", axis=0)
      >>> layer = jax.jit(lambda x: mx_jax.matmul(x, w, recipe="mxfp4"))
      >>> (batch,) = jax.export.symbolic_shape("batch")
      >>> x = jax.ShapeDtypeStruct((batch, 64), jnp.float32)
      >>> saved = jax.export.export(layer, disabled_checks=allowed)(x).serialize()
      >>> jax.export.deserialize(saved).call(jnp.ones((3, 64))).shape
      (3, 8)
    """
    loaded = library.load()
    own = () if isinstance(loaded, str) else loaded.targets
    return tuple(sorted((*own, "LayoutConstraint")))


library.load()
