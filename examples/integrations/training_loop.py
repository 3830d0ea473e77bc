"""optax, orbax, grain and clu around a quantized model: `python training_loop.py`.

Nothing in it is special: the parameters are those of the float32 model. Needs
`pip install grain clu` (0.2.18, 0.0.12) for the data and the metrics, else both are done by hand.
"""

import importlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState
from shared import CLASSES, FEATURES, Report, cross_entropy, data, report, run_command, show, train

from mx_jax.nn.linen import Dense

BATCH = 16


class Model(nn.Module):
    recipe: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(Dense(FEATURES, recipe=self.recipe, name="hidden")(x))
        return nn.Dense(CLASSES, name="head")(x.mean(axis=1))


def optional(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Shuffled batches without end: grain's, where it is installed."""
    x, labels = data()
    grain = optional("grain")
    if grain is not None:
        source = grain.MapDataset.source(list(zip(x, labels, strict=True)))
        yield from source.seed(0).shuffle().repeat().batch(BATCH)
    rng = np.random.default_rng(0)
    while True:
        rows = rng.permutation(len(x))[:BATCH]
        yield x[rows], labels[rows]


def make_state(recipe: str) -> TrainState:
    model = Model(recipe)
    params = model.init(jax.random.key(0), data()[0])["params"]
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


@jax.jit
def step(state: TrainState, x: Any, labels: Any, number: Any) -> tuple[TrainState, jax.Array]:
    key = jax.random.fold_in(jax.random.key(1), number)

    def mean_loss(params: Any) -> jax.Array:
        logits: Any = state.apply_fn({"params": params}, x, rngs={"quantize": key})
        return cross_entropy(logits, labels)

    loss, gradients = jax.value_and_grad(mean_loss)(state.params)
    return state.apply_gradients(grads=gradients), loss


def mean(losses: list[float]) -> float:
    """Of the losses: clu's metric, where it is installed."""
    metrics = optional("clu.metrics")
    if metrics is None:
        return float(np.mean(losses))
    average = metrics.Average.empty()
    for loss in losses:
        average = average.merge(metrics.Average.from_model_output(values=np.float32(loss)))
    return float(average.compute())


def main(steps: int = 20, recipe: str = "mxfp4_stochastic") -> tuple[list[float], Report, Any, Any]:
    inputs = batches()
    state = make_state(recipe)
    compiled = step.lower(state, *next(inputs), 0).compile()
    box = [state]

    def run(state: TrainState, number: int) -> tuple[TrainState, jax.Array]:
        box[0], loss = compiled(state, *next(inputs), number)
        return box[0], loss

    losses = train(run, state, steps)
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        path = Path(folder) / "state"
        kept = {"params": box[0].params, "opt_state": box[0].opt_state, "step": box[0].step}
        checkpointer.save(path, kept)
        checkpointer.wait_until_finished()
        # Into the float32 model: a recipe is no part of a checkpoint.
        plain = make_state("high_precision")
        empty = {"params": plain.params, "opt_state": plain.opt_state, "step": plain.step}
        restored = checkpointer.restore(path, jax.tree.map(jax.numpy.asarray, empty))
    layers = report(compiled.as_text())
    show([f"mean loss {mean(losses):.4f}", "", layers])
    return losses, layers, kept, restored


if __name__ == "__main__":
    run_command(main, __doc__)
