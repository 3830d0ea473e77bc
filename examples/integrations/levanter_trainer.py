"""A recipe in levanter's own Llama and trainer: `python levanter_trainer.py`.

Needs `pip install --pre levanter` (1.2.dev1644). A configuration of levanter builds its model, so
one of one's own builds it with a recipe; model, optimizer and loop are levanter's. Its loss and its
data loader are not used, as they fail in JAX 0.10.
"""

import dataclasses
import tempfile
from typing import Any
from unittest import mock

import haliax as hax
import haliax.nn as hnn
import jax
import numpy as np
from haliax_linear import MxDotGeneral as MxDotGeneral
from haliax_linear import quantized
from levanter.checkpoint import CheckpointerConfig
from levanter.distributed import DistributedConfig, RayConfig
from levanter.layers.attention import AttentionMask
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmConfig, LmExample
from levanter.optim import AdamConfig
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig
from shared import Report, report, run_command, show

import mx_jax


# --8<-- [start:lines]
@LmConfig.register_subclass("mx_llama")
@dataclasses.dataclass(frozen=True)
class MxLlamaConfig(LlamaConfig):
    """levanter's Llama with a recipe in each linear layer of its blocks."""

    recipe: str = "mxfp8"

    def build(self, Vocab, *, key):
        recipe = mx_jax.recipes.from_name(self.recipe)
        return quantized(super().build(Vocab, key=key), recipe, keep=("lm_head",))


Batch, Vocab = hax.make_axes(batch=8, vocab=32)
# --8<-- [end:lines]


def batches(config: LlamaConfig, steps: int) -> list[LmExample]:
    """Sequences that count up, each from its start and by its step."""
    rng = np.random.default_rng(0)
    start, by = (rng.integers(1, 5, (steps, Batch.size, 1)) for _ in range(2))
    rows = (start + by * np.arange(config.Pos.size)) % Vocab.size
    axes = (Batch, config.Pos)
    # The last position has no next one.
    mask = hax.named(np.arange(config.Pos.size) < config.Pos.size - 1 + 0 * rows[0], axes)
    return [
        LmExample(hax.named(row.astype(np.int32), axes), mask, AttentionMask.causal())
        for row in rows
    ]


def next_token_loss(model: Any, example: LmExample, *, key: Any = None) -> Any:
    """levanter's own gives jnp.mean a mask of floats, which JAX 0.10 refuses."""
    logits = model(example.tokens, example.attn_mask, key=key)
    targets = hnn.one_hot(hax.roll(example.tokens, -1, model.Pos), Vocab, dtype=logits.dtype)
    return hnn.cross_entropy_loss(logits, Vocab, targets, where=example.loss_mask)


def main(steps: int = 20, recipe: str = "mxfp8") -> tuple[list[float], Report]:
    """Trains by levanter's `Trainer`; the losses, and what its program holds."""
    model = MxLlamaConfig(
        seq_len=32,
        hidden_dim=64,
        intermediate_dim=128,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        recipe=recipe,
    )
    losses, texts = list[float](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainerConfig(
            id="mx_jax",
            tracker=NoopConfig(),
            num_train_steps=steps,
            train_batch_size=Batch.size,
            log_jaxprs=False,
            log_xla_hlo=False,
            checkpointer=CheckpointerConfig(base_path=folder),
            require_accelerator=False,
            distributed=DistributedConfig(initialize_jax_distributed=False),
            ray=RayConfig(auto_start_cluster=False),
        )
        optimizer = AdamConfig(learning_rate=1e-2).build(steps)
        run = Trainer._maybe_save_jaxpr

        def recorded(self: Trainer, name: str, step: Any, *args: Any, **options: Any) -> Any:
            if not texts:
                texts.append(step.lower(*args, **options).compile().as_text())
            return run(self, name, step, *args, **options)

        with (
            mock.patch.object(Trainer, "_maybe_save_jaxpr", recorded),
            Trainer(settings, optimizer, next_token_loss) as trainer,
        ):
            trainer.add_hook(lambda info: losses.append(float(info.loss)), every=1)
            state = trainer.initial_state(
                jax.random.PRNGKey(1),
                model_init=lambda: model.build(Vocab, key=jax.random.PRNGKey(0)),
            )
            trainer.train(state, batches(model, steps))
    layers = report(texts[0])
    # The hook runs once more at the end.
    losses = losses[:steps]
    show([losses, layers])
    return losses, layers


if __name__ == "__main__":
    run_command(main, __doc__)
