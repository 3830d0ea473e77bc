"""Scales moved between neighbouring layers, so that weights round better: `calibrate.equalize`.

Sources: AWQ (Lin et al., arXiv 2306.00978), whose search by the error of the products this is, and
SmoothQuant (Xiao et al., arXiv 2211.10438), whose scales are among those that it tries.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.calibrate.channels import Channels, Pair, Parameters
from mx_jax.calibrate.moments import Moments
from mx_jax.calibrate.scales import check_moment
from mx_jax.formats import BlockFormat, block_format
from mx_jax.ops.quantize import quantize
from mx_jax.recipes.base import measured_operand

# Powers of inputs' and of weights' sizes that are tried; of equal errors the first one wins.
POWERS = (
    *((0.0, 0.0), (0.15, 0.0), (0.3, 0.0), (0.45, 0.0), (0.6, 0.0), (0.8, 0.0)),
    *((0.25, 0.25), (0.5, 0.5), (0.7, 0.3)),
)


def equalize(
    params: Mapping[str, Any],
    channels: Channels,
    moments: Mapping[str, jax.typing.ArrayLike],
    format: BlockFormat | str,
) -> tuple[dict[str, Any], Moments]:
    """The same model with features scaled where they are written, and back where they are read.

    What a kernel W `[in, out]` reads becomes `x / s`, and W `diag(s) W`. Of
    `s = rms(x)^a / rms(W)^b`, with a row of W for each feature and a geometric mean of 1, each pair
    takes the powers a, b that leave the smallest `|x (diag(1/s) cast(diag(s) W) - W)|^2`; nothing
    is done where that is (0, 0). Gains are divided by s, never s by gains. A head that is tied
    becomes a parameter of its own: the model is no longer tied. To keep it, leave the last of
    `channels.norms` out, and `copies`.

    Args:
      params: nested or flat, in float32 or wider where the function is to stay. Not traced.
      channels: of the model: see `llama`; others name the pairs that they have.
      moments: by path of what is read, or of its layer: see `calibrate.moments`. Pairs without one
        stay as they are.
      format: that weights will be quantized to.

    Returns:
      Parameters of the same names and dtypes, and the head; and the moments of their inputs, which
      `Gptq` takes.

    Raises:
      ValueError: a moment of another shape, or one that `gptq` would not take.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> from mx_jax import calibrate
      >>> params = {"up": jnp.eye(64), "down": jax.random.normal(jax.random.key(0), (64, 32))}
      >>> written, read = calibrate.Features("up", 1), calibrate.Features("down")
      >>> channels = calibrate.Channels(hidden=(calibrate.Pair((written,), (read,)),))
      >>> x, sizes = jax.random.normal(jax.random.key(1), (2, 256, 64))
      >>> x = x * jnp.exp(2 * sizes[0])
      >>> exact = x @ params["up"] @ params["down"]
      >>> scaled, _ = calibrate.equalize(params, channels, {"down": x.T @ x}, "nvfp4")
      >>> bool(jnp.allclose(x @ scaled["up"] @ scaled["down"], exact, rtol=1e-3))
      True
      >>> lost = [
      ...     jnp.linalg.norm(x @ p["up"] @ mx_jax.cast(p["down"], "nvfp4", axis=0) - exact)
      ...     for p in (params, scaled)
      ... ]
      >>> bool(lost[1] < 0.8 * lost[0])
      True
    """
    result, form = Parameters(params, channels.copies), block_format(format)
    inputs: dict[str, Any] = dict(moments)
    for pair in channels.values + channels.hidden + channels.norms:
        names = [_moment_name(each.path, inputs, channels.copies) for each in pair.read]
        known = next((name for name in names if name is not None), None)
        if known is None:
            continue
        kernels = np.concatenate(
            [result.look(each).reshape(-1, result.look(each).shape[-1]) for each in pair.read]
        )
        moment = check_moment(inputs[known], "equalize")
        if len(moment) != kernels.shape[1]:
            raise ValueError(
                "equalize: moment must have one row and one column for each feature, got "
                f"moment.shape={moment.shape} of {known!r} for {kernels.shape[1]} features"
            )
        written = result.look(pair.written[0]).shape[-1]
        scales = _scales(kernels, moment, form, pair, written)
        for each in pair.read:
            result.put(each, result.look(each) * scales)
        # Heads that share what is written have equal scales.
        first = _heads(scales, pair, written)[:, 0].ravel()
        for each in pair.written:
            result.put(each, result.look(each) / first)
        for each, name in zip(pair.read, names, strict=True):
            if name is not None:
                value = jnp.asarray(moment / np.outer(scales, scales), jnp.float32)
                inputs.pop(name, None)
                table = channels.copies.get(each.path)
                inputs[each.path if name == table else name] = value
    return result.tree(), inputs


def _moment_name(path: str, moments: Mapping[str, Any], copies: Mapping[str, str]) -> str | None:
    """Under which name there is a moment of what a parameter is multiplied with."""
    paths = [path, *([copies[path]] if path in copies else [])]
    names = [name for each in paths for name in (each, each.rpartition("/")[0])]
    return next((name for name in names if name in moments), None)


def _heads(features: np.ndarray, pair: Pair, written: int) -> np.ndarray:
    """Of features that are read `[written heads, heads that share each, features of a head]`."""
    width = pair.head_width or written
    return features.reshape(written // width, -1, width)


def _scales(
    kernels: np.ndarray, moment: np.ndarray, format: BlockFormat, pair: Pair, written: int
) -> np.ndarray:
    """What the features that `kernels [out, features]` read are multiplied with."""

    def rms(squares: np.ndarray) -> np.ndarray:
        heads = _heads(squares, pair, written)
        shared = np.broadcast_to(heads.mean(1, keepdims=True), heads.shape).ravel()
        # A feature that never was there bounds no other's scale.
        return np.sqrt(np.maximum(shared, 1e-6 * shared.mean() + np.finfo(np.float64).tiny))

    x, w = rms(np.diag(moment)), rms((kernels**2).mean(0))
    tried = np.stack([x**a / w**b for a, b in POWERS])
    tried /= np.exp(np.log(tried).mean(1, keepdims=True))
    size = max(np.diag(moment).mean(), np.finfo(np.float64).tiny)
    errors = _errors(*(np.asarray(v, np.float32) for v in (kernels, moment / size, tried)), format)
    return tried[int(np.argmin(errors))]


@functools.partial(jax.jit, static_argnums=3)
def _errors(w: jax.Array, moment: jax.Array, scales: jax.Array, format: BlockFormat) -> jax.Array:
    """Squares of what products with `w [out, features]` lose, for each row of scales."""
    rule = measured_operand(format).scale_rule

    def error(s: jax.Array) -> jax.Array:
        lost = quantize(w * s, format, axis=-1, scale_rule=rule).dequantize(jnp.float32) / s - w
        return (lost * jnp.matmul(lost, moment, precision="highest")).sum()

    return lax.map(error, scales)
