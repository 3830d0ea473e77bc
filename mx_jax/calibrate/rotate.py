"""Rotations of a model's residual stream, folded into its weights: nothing is left to compute.

Sources: QuaRot (Ashkboos et al., arXiv 2404.00456) and SpinQuant (Liu et al., arXiv 2405.16406);
for MXFP4 and NVFP4, before GPTQ, MR-GPTQ (Egiazarian et al., arXiv 2509.23202).
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from mx_jax.calibrate.channels import Channels, Features, Parameters


def rotate(
    params: Mapping[str, Any], channels: Channels, *, seed: int = 0, tied: str | None = None
) -> dict[str, Any]:
    """The same model with a residual stream `x Q` for x, and heads' values `v R` for v.

    An RMS norm without gain commutes with an orthogonal Q. So gains g are folded into what reads
    them, `W diag(g)`, never divided by, and become 1; then every W that reads the stream is `W Q`,
    as is every one that writes it, with `[..., features]` in both. R stands between values and the
    output of attention in the same way. A head that is tied becomes a parameter of its own, for
    the table is without its gain: the model is no longer tied. Or, as `tied`, it stays the table,
    and the model multiplies what its head reads by a kernel `Q^T diag(g) Q`.

    Rounding to blocks of four bits errs more on rotated layers than on layers as they are, and much
    less on a head; with `gptq` after it, it errs less on both: see docs/accuracy.md. Moments are
    those of the rotated model.

    Args:
      params: nested or flat, in float32 or wider where the function is to stay; the sums are in
        float64. Not traced.
      channels: of the model: see `llama`.
      seed: of Q and R, `orthogonal`.
      tied: what to call the layer of that kernel `[in, out]`; nothing where a head is not tied.

    Returns:
      Parameters of the same names and dtypes, and the head, or that layer.

    Raises:
      ValueError: norms with a bias, which do not commute.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from mx_jax import calibrate
      >>> up, down = jax.random.normal(jax.random.key(0), (2, 8, 8))
      >>> params = {"norm": jnp.linspace(-1, 1, 8), "up": up, "table": down}
      >>> channels = calibrate.Channels(
      ...     norms=(calibrate.Pair((calibrate.Features("norm"),), (calibrate.Features("up"),)),),
      ...     stream=(calibrate.Features("table", 1),),
      ... )
      >>> rotated = calibrate.rotate(params, channels)
      >>> exact, same = (p["table"] * p["norm"] @ p["up"] for p in (params, rotated))
      >>> bool(jnp.allclose(exact, same, atol=1e-5)), float(rotated["norm"].min())
      (True, 1.0)
    """
    copies = {} if tied is not None else channels.copies
    result, rng = Parameters(params, copies), np.random.default_rng(seed)
    turn = orthogonal(result.look(channels.stream[0]).shape[-1], rng)
    readers: list[Features] = []
    added = {}
    for pair in channels.norms:
        if len(pair.written) != 1:
            raise ValueError(
                "calibrate.rotate: a norm must have a gain alone, for only RMS norms commute with "
                f"rotations, got norm={[each.path for each in pair.written]}"
            )
        gain = pair.written[0]
        factors = result.look(gain)
        if tied is not None and pair.read[0].path in channels.copies:
            added[tied] = {"kernel": jnp.asarray((turn.T * factors) @ turn, jnp.float32)}
        else:
            for each in pair.read:
                result.put(each, result.look(each) * factors)
            readers += pair.read
        result.leaves[gain.path] = np.ones_like(factors)
    for each in (*channels.stream, *readers):
        result.turn(each, turn)
    for pair in channels.values:
        assert pair.head_width is not None
        turn = orthogonal(pair.head_width, rng)
        for each in (*pair.written, *pair.read):
            result.turn(each, turn)
    return {**result.tree(), **added}


def orthogonal(size: int, rng: np.random.Generator) -> np.ndarray:
    """An orthogonal matrix of float64: `diag(signs) (O x H)`.

    H is the Hadamard matrix of the largest power of two that divides the size, O a random
    orthogonal one of what is left (1 for powers of two), and the signs of rows are random.
    """
    hadamard = np.ones((1, 1))
    while size % (2 * len(hadamard)) == 0:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    rest = size // len(hadamard)
    mixed, _ = np.linalg.qr(rng.normal(size=(rest, rest)))
    signs = rng.choice([-1.0, 1.0], (size, 1))
    return signs * np.kron(mixed, hadamard / np.sqrt(len(hadamard)))
