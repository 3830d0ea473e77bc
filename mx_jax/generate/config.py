"""The sizes of a model of the Llama family."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The sizes of a model of the Llama family.

    Attributes:
      vocabulary: number of tokens.
      width: features of the residual stream.
      layers: number of blocks.
      heads: heads of the queries.
      kv_heads: heads of keys and values, each shared by `heads / kv_heads` queries.
      head_width: features of a head, even.
      hidden: features of the feed-forward layer.
      rope_theta: base of the rotary embedding's wavelengths.
      rope_divisors: what the frequency of each pair of a head's features is divided by, for models
        that reach beyond their first context; None: nothing.
      epsilon: of the norms.
      context: most tokens that the model was trained for.
      tied: whether the head multiplies by the embedding.

    Raises:
      ValueError: kv_heads does not divide heads, head_width is odd, or divisors are not one a pair.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    rope_theta: float = 10000.0
    rope_divisors: tuple[float, ...] | None = None
    epsilon: float = 1e-5
    context: int = 2048
    tied: bool = True

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise ValueError(
                f"LlamaConfig: kv_heads must divide heads, got heads={self.heads}, "
                f"kv_heads={self.kv_heads}"
            )
        if self.head_width % 2:
            raise ValueError(
                "LlamaConfig: rotary embedding turns features in pairs, head_width must be even, "
                f"got head_width={self.head_width}"
            )
        divisors = self.rope_divisors
        if divisors is not None and len(divisors) != self.head_width // 2:
            raise ValueError(
                "LlamaConfig: rope_divisors must be one for each pair of features, got "
                f"len(rope_divisors)={len(divisors)}, head_width={self.head_width}"
            )
