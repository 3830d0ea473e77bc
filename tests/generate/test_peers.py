"""The model against transformers, with the same weights."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.generate import tiny

COMMITTED = Path(__file__).parent / "tiny_logits.json"
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def logits_of_transformers(config, tensors, tokens) -> np.ndarray:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")

    theirs = transformers.LlamaConfig(
        vocab_size=config.vocabulary,
        hidden_size=config.width,
        intermediate_size=config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_width,
        rms_norm_eps=config.epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tied,
    )
    model = transformers.LlamaForCausalLM(theirs).eval()
    state = {
        "model.embed_tokens.weight": tensors["token_embd.weight"],
        "model.norm.weight": tensors["output_norm.weight"],
        "lm_head.weight": tensors.get("output.weight", tensors["token_embd.weight"]),
    }
    for index in range(config.layers):
        for name, other in NAMES.items():
            weights = tensors[f"blk.{index}.{name}.weight"]
            if name in ("attn_q", "attn_k"):
                # llama.cpp turns neighbours, transformers halves: convert_hf_to_gguf's permutation
                # undone.
                pairs = weights.reshape(-1, config.head_width // 2, 2, config.width)
                weights = pairs.swapaxes(1, 2).reshape(weights.shape)
            state[f"model.layers.{index}.{other}.weight"] = weights
    given = {name: torch.from_numpy(np.array(value)) for name, value in state.items()}
    model.load_state_dict(given)
    with torch.no_grad():
        return model(torch.from_numpy(np.asarray(tokens, np.int64))).logits.numpy()


@pytest.mark.slow
def test_committed_logits_are_those_of_transformers():
    theirs = logits_of_transformers(tiny.CONFIG, tiny.tensors(), tiny.TOKENS)
    committed = np.array(json.loads(COMMITTED.read_text())["logits"], np.float32)
    np.testing.assert_allclose(committed, theirs, atol=2e-5)
