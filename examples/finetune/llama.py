"""A Llama in flax.nnx: from a file that `examples/generate` reads, and to a folder.

Plain Flax that knows of no format: `train.py` converts it by rules. All blocks are one `nnx.scan`,
so that a step of thirty blocks compiles as fast as that of one. What reads the same input is one
product: queries, keys and values; gate and up.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

import mx_jax
from mx_jax.packed import Quantized

sys.path.append(str(Path(__file__).resolve().parents[1]))

from generate.config import HUB, LlamaConfig
from generate.load import find_model as find_model
from generate.load import open_model as open_model
from generate.load import params_of
from generate.model import PRODUCTS, rotate, rotations
from generate.tokenizer import Tokenizer

# Weights come from a file: random ones would take longer than reading it.
ZEROS = nnx.initializers.zeros


class Block(nnx.Module):
    """Attention and a gated layer, each added to its input."""

    def __init__(self, config: LlamaConfig, rank: int | None, *, rngs: nnx.Rngs):
        layer = nnx.Linear
        if rank is not None:
            layer = functools.partial(nnx.LoRALinear, lora_rank=rank)
        linear = functools.partial(layer, use_bias=False, kernel_init=ZEROS, rngs=rngs)
        norm = functools.partial(nnx.RMSNorm, config.width, epsilon=config.epsilon, rngs=rngs)
        queries, keys = config.heads * config.head_width, config.kv_heads * config.head_width
        self.config = config
        self.attention_norm, self.feed_forward_norm = norm(), norm()
        self.qkv = linear(config.width, queries + 2 * keys)
        self.attention_out = linear(queries, config.width)
        self.gate_up = linear(config.width, 2 * config.hidden)
        self.down = linear(config.hidden, config.width)

    def __call__(self, x: jax.Array, turn: Any) -> jax.Array:
        config, (batch, tokens, _) = self.config, x.shape
        heads, shared = config.heads, config.heads + config.kv_heads
        y = self.qkv(self.attention_norm(x)).reshape(batch, tokens, -1, config.head_width)
        query, key = rotate(y[:, :, :heads], turn), rotate(y[:, :, heads:shared], turn)
        y = jax.nn.dot_product_attention(query, key, y[:, :, shared:], is_causal=True)
        x = x + self.attention_out(y.reshape(batch, tokens, -1))
        gate, up = jnp.split(self.gate_up(self.feed_forward_norm(x)), 2, -1)
        return x + self.down(nnx.silu(gate) * up)


class Llama(nnx.Module):
    """Logits `[batch, tokens, vocabulary]` of tokens `[batch, tokens]`.

    With a rank every kernel of the blocks has an adapter of that rank beside it (LoRA).
    """

    def __init__(self, config: LlamaConfig, *, rank: int | None = None, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap
        def blocks(rngs: nnx.Rngs) -> Block:
            return Block(config, rank, rngs=rngs)

        sizes = config.vocabulary, config.width
        embed = functools.partial(nnx.Embed, *sizes, embedding_init=ZEROS, rngs=rngs)
        self.config = config
        self.embedding = embed()
        self.blocks = blocks(rngs)
        self.norm = nnx.RMSNorm(config.width, epsilon=config.epsilon, rngs=rngs)
        self.head = nnx.data(None if config.tied else embed())

    def __call__(self, tokens: jax.Array) -> jax.Array:
        turn = rotations(self.config, tokens.shape[1], 0)

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def through(block: Block, x: jax.Array) -> jax.Array:
            return block(x, turn)

        x = self.norm(through(self.blocks, self.embedding(tokens)))
        return (self.embedding if self.head is None else self.head).attend(x)


def read_llama(
    path: Path, *, layers: int | None = None, rank: int | None = None, rngs: nnx.Rngs
) -> Llama:
    """The model in a GGUF file or in a folder of Hugging Face's hub, in float32.

    Args:
      path: of the file or the folder; quantized weights become the values that they stand for.
      layers: how many blocks to take, from the first; None: all.
      rank: of adapters.
      rngs: for the adapters.
    """
    source = open_model(path)
    config = dataclasses.replace(source.config, layers=min(layers or 2**30, source.config.layers))
    params = params_of(source.weights, config, source.names)
    blocks = [params.pop(f"layers_{index}") for index in range(config.layers)]
    tables = {name: {"embedding": params[name]} for name in params if name != "norm"}
    model = Llama(config, rank=rank, rngs=rngs)
    nnx.update(model, {**tables, "norm": params["norm"], "blocks": stacked(blocks)})
    return model


def stacked(trees: list[Any]) -> Any:
    """One tree of the arrays of several, which lie along a new first axis."""
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *trees)


def write_llama(model: Llama, folder: Path, like: Path) -> None:
    """Write a model as a folder of Hugging Face's hub, in float32; adapters are added to kernels.

    Args:
      model: of arrays, or with kernels in a format, which become the values that they stand for.
      folder: made here, or written over.
      like: where the model came from: its tokenizer, and its config.json if there is one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source, config = open_model(like), model.config
    kept = {"tie_word_embeddings": config.tied, "torch_dtype": "float32"}
    if like.is_dir():
        for path in (*like.glob("*token*"), *like.glob("*.jinja"), like / "config.json"):
            shutil.copy(path, folder / path.name)
        stated = json.loads((like / "config.json").read_text())
        stated.pop("quantization_config", None)
    else:
        stated = write_tokenizer(source.tokenizer(), folder) | config_of(config)
    stated |= kept | {"num_hidden_layers": config.layers}
    (folder / "config.json").write_text(json.dumps(stated, indent=2))
    save_file(hub_tensors(model), folder / "model.safetensors", {"format": "pt"})


def config_of(config: LlamaConfig) -> dict[str, Any]:
    """A model's sizes from its config.json.

    Raises:
      ValueError: rotary embeddings whose frequencies a file lists one by one.
    """
    if config.rope_divisors is not None:
        raise ValueError(
            "a GGUF file's own rotary frequencies have no place in config.json; pass --model the "
            "model's folder in place of its GGUF file"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "intermediate_size": config.hidden,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.epsilon,
        "rope_theta": config.rope_theta,
    }


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Writes the tokenizer of a GGUF file; returns its part of config.json."""
    tokenizer.encoder.save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": tokenizer.template}
    said |= tokenizer.words
    (folder / "tokenizer_config.json").write_text(json.dumps(said, indent=2))
    return {"eos_token_id": sorted(tokenizer.stop)}


def hub_tensors(model: Llama) -> dict[str, np.ndarray]:
    """Weights `[out, in]` and norms by the hub's names."""
    config, blocks = model.config, model.blocks
    queries, keys = config.heads * config.head_width, config.kv_heads * config.head_width
    whole = {name: merged(getattr(blocks, name)) for name in PRODUCTS}
    query, key, value = np.split(whole["qkv"], [queries, queries + keys], 1)
    gate, up = np.split(whole["gate_up"], 2, 1)
    fields = {"query": query, "key": key, "value": value, "out": whole["attention_out"]}
    fields |= {"gate": gate, "up": up, "down": whole["down"]}
    for name in ("attention_norm", "feed_forward_norm"):
        fields[name] = np.asarray(getattr(blocks, name).scale[...])
    tensors = {
        HUB.of(field, index): np.ascontiguousarray(array[index])
        for field, array in fields.items()
        for index in range(config.layers)
    }
    tensors[HUB.of("norm")] = np.asarray(model.norm.scale[...])
    tensors[HUB.of("embedding")] = np.asarray(model.embedding.embedding[...])
    if model.head is not None:  # not tied
        tensors[HUB.of("head")] = np.asarray(model.head.embedding[...])
    return tensors


def merged(layer: nnx.Linear) -> np.ndarray:
    """The kernels of a stack of layers, `[layers, out, in]`, their adapters added to them."""
    kernel = layer.kernel[...]
    kernel = mx_jax.dequantize(kernel) if isinstance(kernel, Quantized) else kernel
    if isinstance(layer, nnx.LoRALinear):
        kernel = kernel + layer.lora.lora_a[...] @ layer.lora.lora_b[...]
    return np.asarray(kernel.swapaxes(1, 2))
