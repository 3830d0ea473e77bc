"""Models that multiply by name inside their layers, by rules: `python tunix_rules.py`.

Needs `pip install google-tunix` (0.1.7); gemma's layers are reached alike. Their `Einsum` and their
attention call `jnp.einsum` themselves and have no hook: the model's call is traced.
"""

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from shared import Report, report, run_command, show, train

from mx_jax import convert, recipes


def models(name: str) -> types.ModuleType:
    """A model file of tunix, past its front door, which imports every trainer and its needs."""
    if "tunix" not in sys.modules:
        spec = importlib.util.find_spec("tunix")
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError("No module named 'tunix'", name="tunix")
        sys.modules["tunix"] = package = types.ModuleType("tunix")
        package.__spec__, package.__path__ = spec, [str(Path(spec.origin).parent)]
    return importlib.import_module(f"tunix.models.{name}.model")


def small(source: types.ModuleType) -> nnx.Module:
    config = source.ModelConfig(
        num_layers=1,
        vocab_size=32,
        embed_dim=64,
        hidden_dim=64,
        num_heads=2,
        head_dim=32,
        num_kv_heads=1,
        rope_theta=10000,
        norm_eps=1e-5,
    )
    return source.Llama3(config, rngs=nnx.Rngs(0))


def main(steps: int = 20) -> tuple[list[float], Report, convert.Report]:
    source = models("llama3")
    # The first rule that matches decides: the head stays in high precision.
    rules = [
        convert.Rule("lm_head", None),
        convert.Rule(".*", recipes.mxfp8()),
    ]
    model: Any = small(source)
    tokens = np.random.default_rng(0).integers(0, 32, (4, 16))
    positions = np.broadcast_to(np.arange(16), tokens.shape)
    mask = jnp.tril(jnp.ones((4, 16, 16), bool))
    decisions = convert.report(model, rules, tokens, positions, None, mask)
    model = convert.nnx(model, rules)
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: nnx.Optimizer) -> jax.Array:
        def mean_loss(model: Any) -> jax.Array:
            logits, _ = model(tokens, positions, None, mask)
            following = jnp.asarray(tokens[:, 1:])
            return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], following).mean()

        loss, gradients = nnx.value_and_grad(mean_loss)(model)
        optimizer.update(model, gradients)
        return loss

    compiled = step.lower(model, optimizer).compile()
    losses = train(lambda state, _: (state, compiled(*state)), (model, optimizer), steps)
    layers = report(compiled.as_text())
    show([decisions, "", layers])
    return losses, layers, decisions


if __name__ == "__main__":
    run_command(main, __doc__)
