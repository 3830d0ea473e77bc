"""What is trained: the linear layers of a transformer's blocks, and how much else there is."""

import dataclasses
import math
from typing import Any, Literal

Split = Literal["column", "row"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear:
    """A linear layer `[tokens, k] -> [tokens, n]`.

    Attributes:
      name: what tables call it.
      k: features that go in.
      n: features that come out.
      split: which axis of its weight the mesh axis `model` shards: `"column"` n, `"row"` k; `fsdp`
        shards the other.
      recomputed: whether a block that is rematerialized computes it again: not what only the
        residual stream reads.
      experts: how many such layers there are, of which a token goes through some.
      experts_per_token: how many.
    """

    name: str
    k: int
    n: int
    split: Split
    recomputed: bool = True
    experts: int = 1
    experts_per_token: int = 1

    @property
    def is_routed(self) -> bool:
        """Whether it is one of experts."""
        return self.experts > 1

    @property
    def is_input_of_experts(self) -> bool:
        """Whether rows come to it from other devices."""
        return self.is_routed and self.split == "column"

    @property
    def params(self) -> int:
        """Elements of its weights."""
        return self.k * self.n * self.experts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A transformer.

    Attributes:
      params: of all of it.
      layers: number of blocks.
      width: features of the residual stream.
      linears: the linear layers of one block, all of which follow the recipe.
      assumed: what was not said, in words.
    """

    params: int
    layers: int
    width: int
    linears: tuple[Linear, ...]
    assumed: tuple[str, ...] = ()

    def __post_init__(self):
        if self.other_params < 0:
            raise ValueError(
                f"plan: the linear layers have {self.linear_params:,} parameters, more than "
                f"params={self.params:,}; check --params, --layers, --width and --hidden"
            )

    @property
    def linear_params(self) -> int:
        """Parameters of the linear layers in all blocks."""
        return self.layers * sum(linear.params for linear in self.linears)

    @property
    def other_params(self) -> int:
        """Embedding, head, norms: what no recipe quantizes."""
        return self.params - self.linear_params


def transformer(
    params: float,
    layers: int,
    *,
    width: int | None = None,
    hidden: int | None = None,
    kv_width: int | None = None,
    vocabulary: int = 0,
    experts: int = 1,
    experts_per_token: int = 1,
    multiple: int = 256,
) -> Model:
    """A decoder with a gated MLP, or a mixture of such experts: `qkv`, `out`, `gate_up` and `down`.

    Args:
      params: of the whole model.
      layers: number of blocks.
      width: of the residual stream; None: such that a block with `hidden = 8/3 width` has its share
        of the parameters, `width = sqrt(params / (12 layers))`.
      hidden: features between `gate_up` and `down`; None: what the parameters leave.
      kv_width: features of the keys, heads times their width; None: `width`.
      vocabulary: rows of embedding and head, which are not tied; 0: neither is counted.
      experts: gated MLPs of each block; 1: it has one, which every token goes through.
      experts_per_token: how many of them a token goes through.
      multiple: what a width that is derived is rounded to.

    Returns:
      A `Model`, which says what it assumed.

    Raises:
      ValueError: numbers that are not positive, or leave nothing for the MLP.

    Examples:
      >>> from mx_jax.plan.model import transformer
      >>> llama = transformer(70.6e9, 80, width=8192, kv_width=1024, vocabulary=128256)
      >>> [(own.name, own.k, own.n) for own in llama.linears][2:]
      [('gate_up', 8192, 57344), ('down', 28672, 8192)]
    """
    given = {"params": params, "layers": layers, "width": width, "hidden": hidden}
    _check(given | {"kv_width": kv_width}, experts, experts_per_token)
    assumed = []
    if width is None:
        width = max(1, round(math.sqrt(params / (12 * layers)) / multiple)) * multiple
        assumed.append(f"width={width:,}, such that a block has its share of the parameters")
    if kv_width is None:
        kv_width = width
        assumed.append(f"kv_width={kv_width:,}, as many heads of keys as of queries")
    if hidden is None:
        left = (params - 2 * vocabulary * width) / layers - 2 * width * (width + kv_width)
        hidden = round(left / (3 * width * experts) / multiple) * multiple
        if hidden <= 0:
            raise ValueError(
                f"plan: nothing is left for the MLP, got params={params:,.0f}, layers={layers}, "
                f"width={width}, kv_width={kv_width}, vocabulary={vocabulary}; pass another width"
            )
        whose = "a gated MLP" if experts == 1 else f"{experts} gated MLPs"
        assumed.append(f"hidden={hidden:,}, what the parameters leave for {whose}")
    linears = _linears(width, hidden, kv_width, experts, experts_per_token)
    # A width that was rounded may need a little more than was given.
    most = max(round(params), layers * sum(linear.params for linear in linears))
    params = most if most < 1.02 * params else round(params)
    return Model(params=params, layers=layers, width=width, linears=linears, assumed=tuple(assumed))


def _check(given: dict[str, Any], experts: int, experts_per_token: int) -> None:
    given = given | {"experts": experts, "experts_per_token": experts_per_token}
    for name, value in given.items():
        if value is not None and not value > 0:
            raise ValueError(f"plan: {name} must be positive, got {name}={value}")
    if experts_per_token > experts:
        raise ValueError(
            f"plan: a token goes through some of the experts, got experts_per_token="
            f"{experts_per_token}, experts={experts}; pass --experts"
        )


def _linears(
    width: int, hidden: int, kv_width: int, experts: int, experts_per_token: int
) -> tuple[Linear, ...]:
    """The layers of a block."""
    routed: dict[str, Any] = {"experts": experts, "experts_per_token": experts_per_token}
    return (
        Linear(name="qkv", k=width, n=width + 2 * kv_width, split="column"),
        Linear(name="out", k=width, n=width, split="row"),
        Linear(name="gate_up", k=width, n=2 * hidden, split="column", **routed),
        # The weights that a router gives experts have a gradient, which reads what experts give.
        Linear(name="down", k=hidden, n=width, split="row", recomputed=experts > 1, **routed),
    )
