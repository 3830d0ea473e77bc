"""Codes that are kept for the backward pass are quantized twice: what does the second time cost?

The backward products contract other axes, so kept codes are dequantized and quantized anew along
the other one. With scales that are powers of two the second rounding is exact but for values near
the bottom of the format. With float32 scales every value is rounded twice.

    python examples/findings/requantized_tiles.py
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from findings_figure import parse_no_options, save

import mx_jax

FORMATS = {
    "mxfp8_e4m3": "rceil",
    "mxfp6_e2m3": "even",
    "mxfp4": "even",
    "float8_blockwise_e4m3": None,
}


def measure(format: str) -> dict[str, float]:
    """SQNR along the other axis in dB: from the values themselves, and from codes of the first."""
    x = jax.random.normal(jax.random.key(0), (1024, 1024))
    options = {} if FORMATS[format] is None else {"scale_rule": FORMATS[format]}
    kept = mx_jax.cast(x, format, axis=1, **options)
    requantized = mx_jax.cast(kept, format, axis=0, **options)
    once = mx_jax.cast(x, format, axis=0, **options)
    return {
        "once": mx_jax.inspect.sqnr_db(x, once),
        "twice": mx_jax.inspect.sqnr_db(x, requantized),
    }


def draw(axes: Any) -> None:
    sqnr = [measure(format) for format in FORMATS]
    places = np.arange(len(FORMATS))
    axes.bar(places - 0.2, [db["once"] for db in sqnr], 0.4, label="from the values")
    axes.bar(places + 0.2, [db["twice"] for db in sqnr], 0.4, label="from kept codes")
    axes.set_xticks(places, FORMATS)
    axes.set(ylabel="SQNR (dB)", ylim=(0, 42))
    axes.legend(ncols=2)


if __name__ == "__main__":
    parse_no_options(__doc__)
    for format in FORMATS:
        print(format, measure(format))
    save("requantized_tiles", draw)
