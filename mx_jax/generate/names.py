"""What a checkpoint calls the tensors of a Llama: a row for each way that is in use."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
    """Names of tensors; those of a block with its number in braces.

    Attributes:
      embedding: `[vocabulary, width]`.
      norm: of the last norm.
      head: `[vocabulary, width]`; absent where the embedding is the head's matrix.
      attention_norm: of each block.
      query: `[heads * head_width, width]`.
      key: `[kv_heads * head_width, width]`.
      value: likewise.
      out: `[width, heads * head_width]`.
      feed_forward_norm: of each block.
      gate: `[hidden, width]`.
      up: likewise.
      down: `[width, hidden]`.
      adjacent: whether the pairs of features that are turned lie next to each other in the rows of
        a head's queries and keys, instead of half a head apart.
    """

    embedding: str
    norm: str
    head: str
    attention_norm: str
    query: str
    key: str
    value: str
    out: str
    feed_forward_norm: str
    gate: str
    up: str
    down: str
    adjacent: bool


GGUF = Names(
    embedding="token_embd.weight",
    norm="output_norm.weight",
    head="output.weight",
    attention_norm="blk.{}.attn_norm.weight",
    query="blk.{}.attn_q.weight",
    key="blk.{}.attn_k.weight",
    value="blk.{}.attn_v.weight",
    out="blk.{}.attn_output.weight",
    feed_forward_norm="blk.{}.ffn_norm.weight",
    gate="blk.{}.ffn_gate.weight",
    up="blk.{}.ffn_up.weight",
    down="blk.{}.ffn_down.weight",
    adjacent=True,
)
HUB = Names(
    embedding="model.embed_tokens.weight",
    norm="model.norm.weight",
    head="lm_head.weight",
    attention_norm="model.layers.{}.input_layernorm.weight",
    query="model.layers.{}.self_attn.q_proj.weight",
    key="model.layers.{}.self_attn.k_proj.weight",
    value="model.layers.{}.self_attn.v_proj.weight",
    out="model.layers.{}.self_attn.o_proj.weight",
    feed_forward_norm="model.layers.{}.post_attention_layernorm.weight",
    gate="model.layers.{}.mlp.gate_proj.weight",
    up="model.layers.{}.mlp.up_proj.weight",
    down="model.layers.{}.mlp.down_proj.weight",
    adjacent=False,
)
