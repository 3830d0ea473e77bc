"""Arrays as models have them: what is fast on one kind of data may not be on another."""

import numpy as np

# Normal; Student's t with three degrees of freedom; lognormal, of both signs; normal with one
# column in a hundred a hundred times as large.
KINDS = ("normal", "student_t", "lognormal", "outliers")


def draw(kind: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Float32 values of a kind.

    Raises:
      ValueError: the kind is none of KINDS.
    """
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape)
    if kind == "student_t":
        values = rng.standard_t(3, shape)
    elif kind == "lognormal":
        values = np.sign(values) * np.exp(2 * rng.standard_normal(shape))
    elif kind == "outliers":
        values *= np.where(rng.random(shape[-1]) < 0.01, 100.0, 1.0)
    elif kind != "normal":
        raise ValueError(f"draw: data must be one of {KINDS}, got kind={kind!r}")
    return values.astype(np.float32)
