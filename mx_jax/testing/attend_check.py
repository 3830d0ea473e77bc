"""Attention of one token against float64's, over values and over codes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax import formats
from mx_jax.backends.base import Backend
from mx_jax.backends.calls import AttendCall
from mx_jax.formats import BlockFormat
from mx_jax.packed import PackedRows, Rows
from mx_jax.testing.draw import draw_mxarray
from mx_jax.testing.matmul_check import exact_values


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttendCase:
    """Attention of tokens that follow each other.

    Attributes:
      format: block format of keys and values; None for high precision.
      matrices: of keys.
      heads: of queries that share one.
      length: rows of each.
      features: of a row.
      tokens: how many.
      position: row of the first.
      dtype: name of the dtype of keys and values without a format, and of queries.
    """

    format: BlockFormat | None = None
    matrices: int = 2
    heads: int = 3
    length: int = 40
    features: int = 64
    tokens: int = 1
    position: int = 25
    dtype: str = "float32"

    @property
    def call(self) -> AttendCall:
        """What backends see of it."""
        return AttendCall(
            queries=(self.matrices, self.heads * self.tokens, self.features),
            keys=(self.matrices, self.length, self.features),
            dtypes=(jnp.dtype(self.dtype),) * 3,
            tokens=self.tokens,
            format=self.format,
        )

    def rows(self, rng: np.random.Generator) -> tuple[Rows, np.ndarray]:
        """Keys or values, and what they are in float64."""
        shape = self.call.keys
        if self.format is None:
            drawn = jnp.asarray(rng.standard_normal(shape), self.dtype)
            return drawn, np.asarray(drawn, np.float64)
        x = draw_mxarray(rng, shape, self.format, ((-1, self.format.block[1]),), 3)
        packed = PackedRows(
            codes=x.packed_codes,
            scales=x.scales,
            tensor_scale=x.tensor_scale,
            format=self.format,
            features=self.features,
            dtype=jnp.dtype(self.dtype),
        )
        return packed, exact_values(x)

    def __str__(self) -> str:
        held = self.dtype if self.format is None else self.format.name
        sizes = f"{self.matrices}x{self.heads}x{self.length}x{self.features}"
        return f"{held}-{sizes}-{self.tokens}at{self.position}"


ATTEND_CASES: tuple[AttendCase, ...] = (
    AttendCase(),
    AttendCase(length=17, features=7, position=16),
    AttendCase(tokens=3),
    *(
        AttendCase(format=format)
        for format in (formats.MXFP8_E4M3, formats.MXFP6_E2M3, formats.MXINT8, formats.NVFP4)
    ),
    # The last block and the last byte of a row are not full.
    AttendCase(format=formats.MXFP4, length=150, features=41, position=140),
    AttendCase(format=formats.MXFP8_E5M2, matrices=1, heads=1, position=0),
)


def check_attend(backend: Backend, case: AttendCase) -> None:
    """Compare with float64, within what float32 sums may lose.

    A score of terms of size s is off by `2^-24 (4 + features) s` at most, and its weight by as
    much of itself.
    """
    call, rng = case.call, np.random.default_rng(0)
    queries = jnp.asarray(rng.standard_normal(call.queries), case.dtype)
    (keys, exact_keys), (values, exact_values_) = case.rows(rng), case.rows(rng)
    run = jax.jit(lambda *given: backend.run(call, *given))
    actual = run(queries, keys, values, np.int32(case.position))
    assert actual.shape == call.queries, f"{actual.shape} is not {call.queries}"
    last = case.position + np.tile(np.arange(case.tokens), case.heads)
    unseen = np.arange(case.length) > last[:, None]
    terms = np.asarray(queries, np.float64)[:, :, None] * exact_keys[:, None]
    terms *= case.features**-0.5
    scores = np.where(unseen, -np.inf, terms.sum(-1))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = weights @ exact_values_
    sizes = np.where(unseen, 0, np.abs(terms).sum(-1)).max(-1, keepdims=True)
    lost = 2.0**-24 * (32 + case.length + 2 * (4 + case.features) * sizes)
    allowed = lost * (weights @ np.abs(exact_values_))
    far = ~(np.abs(actual - expected) <= allowed)
    assert not far.any(), (
        f"{far.sum()} of {far.size} are too far from the exact ones, the first at "
        f"{np.argwhere(far)[0].tolist()}"
    )
