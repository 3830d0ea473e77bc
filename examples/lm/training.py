"""The optimizer step, the validation, and the loop around them that survives being stopped."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from recipes.schedule import heal
from tqdm import tqdm

from .data import Corpus
from .mesh import place_batch, place_state, together
from .model import Transformer, predict
from .settings import STATES, Precision, Settings, precision
from .storage import Checkpoints, Run


class TrainState(NamedTuple):
    """The state that a step updates; the step count lives in the optimizer's state.

    Attributes:
      params: the parameters.
      optimizer: the optimizer's own.
      average: mean of the parameters after each step of the last quarter, so far: what single steps
        throw them about by is mostly gone in it.
    """

    params: Any
    optimizer: Any
    average: Any


class Interrupted(Exception):
    """A signal asked to stop, and the state is saved."""


def build_model(chosen: Precision, settings: Settings, vocabulary: int) -> Transformer:
    """The transformer of `settings` in a precision."""
    return Transformer(
        vocabulary=vocabulary,
        d_model=settings.d_model,
        layers=settings.layers,
        heads=settings.heads,
        context=settings.context,
        recipe=chosen.recipe,
        dtype=chosen.dtype,
        head=chosen.head,
        high_blocks=chosen.high_blocks,
    )


def build_optimizer(settings: Settings) -> optax.GradientTransformation:
    """AdamW with warm-up, cosine decay to a tenth, and clipped gradients."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=settings.lr,
        warmup_steps=settings.warmup,
        decay_steps=settings.steps,
        end_value=settings.lr / 10,
    )

    def is_matrix(params: Any) -> Any:
        # By name: the scan over blocks gives their norm scales a second axis.
        return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != "scale", params)

    optimizer = optax.chain(
        optax.clip_by_global_norm(settings.grad_clip),
        optax.adamw(schedule, b2=0.95, weight_decay=settings.weight_decay, mask=is_matrix),
    )
    return STATES[settings.states](optimizer)


@partial(jax.jit, static_argnames=("settings", "vocabulary"))
def initial_state(seed: int, *, settings: Settings, vocabulary: int) -> TrainState:
    """The state before the first step: one for all recipes, so float32's model makes it."""
    model = build_model(precision("float32"), settings, vocabulary)
    tokens = jnp.zeros((1, settings.context), jnp.int32)
    params = model.init(jax.random.key(seed), tokens)["params"]
    # Overwritten by the first step. Not `params` again: a step donates each buffer once.
    average = jax.tree.map(jnp.zeros_like, params)
    return place_state(TrainState(params, build_optimizer(settings).init(params), average))


def mean_loss(params: Any, tokens: jax.Array, model: Transformer, key: jax.Array) -> jax.Array:
    """Mean nats per character of predicting each window's next character."""
    tokens = place_batch(tokens)
    logits = predict(params, tokens[:, :-1], model, key)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@partial(jax.jit, static_argnames=("model", "settings"), donate_argnames="state")
def train_step(
    state: TrainState,
    tokens: jax.Array,
    seed: int,
    step: int,
    *,
    model: Transformer,
    settings: Settings,
) -> tuple[TrainState, jax.Array]:
    """One optimizer step on windows [batch, context + 1]; returns the loss before it."""
    # A step draws by nothing else, so a resumed run draws the same.
    key = jax.random.fold_in(jax.random.key(seed), step)
    loss, gradient = jax.value_and_grad(mean_loss)(state.params, tokens, model, key)
    updates, optimizer = build_optimizer(settings).update(gradient, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    average = averaged(state.average, params, step, settings)
    return place_state(TrainState(params, optimizer, average)), loss


def averaged(average: Any, params: Any, step: int, settings: Settings) -> Any:
    """The mean of the last quarter's parameters with those after `step`; before, these alone."""
    count = jnp.maximum(step + 1 - (settings.steps - settings.late_steps), 1)

    def mean(before: jax.Array, newest: jax.Array) -> jax.Array:
        return jnp.where(count == 1, newest, before + (newest - before) / count)

    return jax.tree.map(mean, average, params)


@partial(jax.jit, static_argnames="model")
def validate(params: Any, batches: jax.Array, *, model: Transformer) -> jax.Array:
    """Mean loss over validation windows [batches, batch, context + 1]."""
    key = jax.random.key(0)  # the same each time, as the characters are
    return jax.lax.map(lambda tokens: mean_loss(params, tokens, model, key), batches).mean()


class Trainer:
    """One run from its newest checkpoint, or from its seed, to its last step.

    Every random choice is a function of seed and step, so a run that was stopped, or
    killed, ends bit by bit where an undisturbed one ends.
    """

    def __init__(
        self,
        run: Run,
        settings: Settings,
        corpus: Corpus,
        checkpoints: Checkpoints,
        chosen: Precision | None = None,
    ):
        """Prepares a run of the recipe that it names, or of `chosen`."""
        self.run = run
        self.settings = settings
        self.corpus = corpus
        self.checkpoints = checkpoints
        self._chosen = chosen or precision(run.recipe)
        self._schedule = heal(self._chosen.recipe, settings.steps, last=settings.heal)
        self.state = together(
            initial_state, run.seed, settings=settings, vocabulary=len(corpus.vocabulary)
        )
        # Without a checkpoint from its start, however far the recorded curves came.
        fresh = Run(recipe=run.recipe, seed=run.seed)
        self.state, self.run = checkpoints.restore(self.state) or (self.state, fresh)
        self._lap = time.perf_counter()
        self._compiled: Transformer | None = None

    @property
    def model(self) -> Transformer:
        """The model of the next step: equal ones share a program, so each phase has one."""
        chosen = dataclasses.replace(self._chosen, recipe=self._schedule.at(self.run.step))
        return build_model(chosen, self.settings, len(self.corpus.vocabulary))

    def train(self, *, checkpoint_every: int, stop: Callable[[], bool]) -> None:
        """Trains until done or diverged; raises `Interrupted`, state saved, when `stop` says so."""
        with Progress(self.run, self.settings) as progress:
            while self.run.step < self.settings.steps and self.run.diverged_at is None:
                if stop():
                    self.checkpoints.save(self.state, self.run)
                    raise Interrupted
                self._step(progress)
                if self.run.step % checkpoint_every == 0 and self.run.diverged_at is None:
                    self.checkpoints.save(self.state, self.run)
            self.run.finished = self.run.diverged_at is None
        if self.run.finished:
            self.checkpoints.save(self.state, self.run)

    def _tokens(self) -> Any:
        settings, run = self.settings, self.run
        return self.corpus.batch(
            seed=run.seed, step=run.step, batch=settings.batch, context=settings.context
        )

    def _step(self, progress: Progress) -> None:
        settings, run = self.settings, self.run
        started = time.perf_counter()
        operands = self.state, self._tokens(), run.seed, run.step
        model = self.model
        self.state, loss = together(train_step, *operands, model=model, settings=settings)
        # Read every step: divergence shows at once, and waiting costs nothing at this size.
        loss = float(loss)
        if self._compiled == model:
            run.step_seconds += time.perf_counter() - started
            run.timed_steps += 1
        self._compiled = model
        if not math.isfinite(loss):
            run.diverged_at = run.step
            return
        run.train_loss.append(loss)
        progress.stepped(loss)
        if run.step % settings.eval_every == 0 or run.step == settings.steps:
            self._validate(progress)
        now = time.perf_counter()
        run.seconds += now - self._lap
        self._lap = now

    def _validate(self, progress: Progress) -> None:
        loss = self._validation_loss(self.state.params)
        if not math.isfinite(loss):
            self.run.diverged_at = self.run.step
            return
        self.run.validation.append((self.run.step, loss))
        if self.run.step == self.settings.steps:
            self.run.averaged_loss = self._validation_loss(self.state.average)
        progress.validated(loss)

    def _validation_loss(self, params: Any) -> float:
        return float(together(validate, params, self._validation_batches, model=self.model))

    @cached_property
    def _validation_batches(self) -> Any:
        settings = self.settings
        batches = self.corpus.validation_batches(
            batch=settings.batch, context=settings.context, tokens=settings.eval_tokens
        )
        # Of one process's own devices: where there are several, every one passes all of them.
        return jnp.asarray(batches) if jax.process_count() == 1 else batches


class Progress:
    """A bar in a terminal; elsewhere one line per validation, so that logs stay short."""

    def __init__(self, run: Run, settings: Settings) -> None:
        self._run = run
        self._settings = settings
        self._notes: dict[str, str] = {}
        self._bar = tqdm(
            desc=run.label,
            total=settings.steps * settings.tokens_per_step,
            initial=run.step * settings.tokens_per_step,
            unit="tokens",
            unit_scale=True,
            dynamic_ncols=True,
            disable=None,
        )
        self._bar.set_postfix_str("compiling")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def stepped(self, loss: float) -> None:
        """Moves the bar by one step."""
        self._notes["loss"] = f"{loss:.3f}"
        self._bar.set_postfix(self._notes, refresh=False)
        self._bar.update(self._settings.tokens_per_step)

    def validated(self, loss: float) -> None:
        """Shows the newest validation loss."""
        self._notes["validation"] = f"{loss:.4f}"
        self._bar.set_postfix(self._notes)
        if self._bar.disable:
            run = self._run
            print(
                f"{run.label}: step {run.step:,} of {self._settings.steps:,}, "
                f"loss {run.train_loss[-1]:.3f}, validation {loss:.4f}, "
                f"{run.tokens_per_second(self._settings):,.0f} tokens/s",
                flush=True,
            )


@contextmanager
def stop_request() -> Iterator[Callable[[], bool]]:
    """Turns the first Ctrl-C or SIGTERM into a question the loop asks; a second one kills.

    A step donates its state, so an exception inside one would leave nothing to save.
    """
    received: list[int] = []

    def restore_handlers() -> None:
        for number, handler in earlier.items():
            signal.signal(number, handler)

    def handle(number: int, _: Any) -> None:
        received.append(number)
        restore_handlers()
        # Not `print`: the signal may have come in the middle of one.
        os.write(2, b"\nstopping after this step (once more: at once) ...\n")

    earlier = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    finally:
        restore_handlers()
