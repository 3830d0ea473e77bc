"""Shared cases and comparisons, installed so that tests, benchmarks and tuning agree; machines."""

from contextlib import AbstractContextManager

from mx_jax.backends.target import Target, use_target
from mx_jax.codecs.lowering import PLATFORMS


def target(
    platform: str,
    compute_capability: tuple[int, int] | None = None,
    *,
    num_devices: int = 1,
    device_kind: str | None = None,
    counted: bool = True,
) -> AbstractContextManager[None]:
    """A context in which backends are chosen for this machine, whether it is there or not.

    What is traced in it can be lowered for the machine's platform and read; running it needs the
    machine. It goes before `jax.default_device`, meshes and arrays, and enters jit's cache key.

    Args:
      platform: `"cpu"`, `"cuda"`, `"rocm"` or `"tpu"`.
      compute_capability: of a CUDA GPU, e.g. `(9, 0)` for an H200; other platforms have none.
      num_devices: between how many devices `jit` may split a call.
      device_kind: jax's name of the device, e.g. `"NVIDIA H200"`, by which measurements of kernels
        are found; None: none are.
      counted: False: `num_devices` exist, and only lowering knows how many a program has, as where
        no mesh is in context.

    Returns:
      The context manager.

    Raises:
      ValueError: an unknown platform, CUDA without a compute capability or another platform with
        one, or no device.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> recipe = mx_jax.recipes.float8_rowwise()
      >>> product = jax.jit(lambda x, w: mx_jax.matmul(x, w, recipe=recipe))
      >>> with mx_jax.testing.target("cuda", (9, 0)):
      ...     traced = product.trace(jnp.ones((4, 64)), jnp.ones((64, 8)))
      ...     text = traced.lower(lowering_platforms=("cuda",)).as_text()
      >>> "tensor<4x64xf8E4M3FN>, tensor<8x64xf8E4M3FN>" in text
      True
    """
    got = f"platform={platform!r}, compute_capability={compute_capability}"
    if platform not in PLATFORMS:
        raise ValueError(f"target: needs one of the platforms {', '.join(PLATFORMS)}, got {got}")
    if platform == "cuda" and compute_capability is None:
        raise ValueError(f'target: needs the compute capability, as in ("cuda", (9, 0)), got {got}')
    if platform != "cuda" and compute_capability is not None:
        raise ValueError(
            f"target: only CUDA GPUs have a compute capability, got {got}; leave it out"
        )
    if num_devices < 1:
        raise ValueError(f"target: needs a device, got num_devices={num_devices}")
    is_pair = isinstance(compute_capability, tuple) and len(compute_capability) == 2
    if compute_capability is not None and not (
        is_pair and all(type(number) is int for number in compute_capability)
    ):
        raise ValueError(f"target: a compute capability is two numbers, (9, 0), got {got}")
    return use_target(
        Target(
            platform=platform,
            compute_capability=compute_capability,
            num_devices=num_devices,
            device_kind=device_kind,
            counted=counted,
        )
    )
