"""The files of runs: their curves, their checkpoints, and the results."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from .disk import (
    DiskError,
    check_checksums,
    check_room,
    one_message,
    record_checksums,
    replace,
    writing,
)
from .mesh import is_first, wait_for_all
from .settings import Settings


@dataclass(kw_only=True)
class Run:
    """One recipe and one seed: its progress and its measurements."""

    recipe: str
    seed: int
    train_loss: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    # After the last step, of the parameters averaged over the last quarter; None: not recorded.
    averaged_loss: float | None = None
    diverged_at: int | None = None
    finished: bool = False
    seconds: float = 0.0
    # Of optimizer steps alone: without compiling, validating and saving.
    step_seconds: float = 0.0
    timed_steps: int = 0

    @property
    def name(self) -> str:
        """Unique in one output folder."""
        return f"{self.recipe}-seed{self.seed}"

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.recipe}, seed {self.seed}"

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to train."""
        return self.finished or self.diverged_at is not None

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return len(self.train_loss)

    @property
    def final_loss(self) -> float | None:
        """Validation loss in nats per character; `None` until finished."""
        return self.validation[-1][1] if self.finished else None

    def tokens_per_second(self, settings: Settings) -> float:
        """Training throughput; 0 before the second step."""
        steps_per_second = self.timed_steps / self.step_seconds if self.timed_steps else 0.0
        return settings.tokens_per_step * steps_per_second

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Run:
        """The run behind `dataclasses.asdict` and a round trip through JSON; extra keys pass."""
        # Results from before this was recorded can be added to.
        entry = {"averaged_loss": None, **entry}
        run = cls(**{f.name: entry[f.name] for f in fields(cls)})
        run.validation = [(step, loss) for step, loss in run.validation]
        return run


class Checkpoints:
    """The newest states of one run on disk, beside the curves that led to them."""

    def __init__(self, folder: Path, *, keep: int = 3) -> None:
        self._folder = folder.resolve()
        # Synchronous: when `save` returns, the state is safe. More than one is kept, since a
        # disk may lose part of the newest one.
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        with writing("checkpoints", self._folder), one_message():
            self._manager = ocp.CheckpointManager(self._folder, options=options)

    @property
    def folder(self) -> Path:
        """Where they lie."""
        return self._folder

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def save(self, state: Any, run: Run) -> None:
        """Writes both, unless this step is there already."""
        if self._manager.latest_step() == run.step:
            return
        items = {"state": ocp.args.StandardSave(state), "run": ocp.args.JsonSave(asdict(run))}
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        what = f"the checkpoint of step {run.step:,} ({size / 1e6:,.1f} MB)"
        with writing(what, self._folder, self._remove_partial), one_message():
            check_room(self._folder, size)
            self._manager.save(run.step, args=ocp.args.Composite(**items))
            if is_first():
                record_checksums(self._folder / str(run.step))
            wait_for_all("checksums")

    def restore(self, like: Any) -> tuple[Any, Run] | None:
        """The newest state that can be read, with the structure of `like`, and its run.

        Returns `None` if nothing was saved. Says so where it passes over a damaged checkpoint,
        which is deleted once an older one is read: its steps are trained again, bit for bit.
        """
        damaged: dict[int, str] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                with one_message():
                    restored = self._restore_step(step, like)
            # Whatever Orbax, TensorStore or JSON raise for files that are cut off or missing.
            except Exception as error:
                damaged[step] = _first_line(error)
                continue
            for newer, reason in damaged.items():
                self._manager.delete(newer)
                print(
                    f"{self._folder.name}: cannot read the checkpoint of step {newer:,}, "
                    f"going back to step {step:,} ({reason})",
                    file=sys.stderr,
                )
            return restored
        if damaged:
            reasons = "; ".join(f"step {step:,}: {reason}" for step, reason in damaged.items())
            raise DiskError(
                f"cannot read any checkpoint in {self._folder} ({reasons}); to train this run "
                "from its start, delete that folder and pass --resume: other runs are kept"
            )
        return None

    def _restore_step(self, step: int, like: Any) -> tuple[Any, Run]:
        check_checksums(self._folder / str(step))
        items = {"state": ocp.args.StandardRestore(like), "run": ocp.args.JsonRestore()}
        restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        return restored["state"], Run.from_dict(restored["run"])

    def _remove_partial(self) -> str:
        """Makes room on a full disk, and names the checkpoint that remains."""
        for partial in self._folder.glob("*.orbax-checkpoint-tmp"):
            shutil.rmtree(partial, ignore_errors=True)
        step = self._manager.latest_step()
        return f"the newest one is of step {step:,}" if step else "there is no earlier one"


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, DiskError) else f"{type(error).__name__}: {text}"[:200]


class OutputError(Exception):
    """The output folder cannot be used as asked; the message says what to pass instead."""


@dataclass(kw_only=True)
class Output:
    """The output folder: `results.json`, `loss.png` and `checkpoints/`."""

    folder: Path
    settings: Settings
    fingerprint: str
    environment: dict[str, str]
    runs: dict[str, Run] = field(default_factory=dict)

    @property
    def results(self) -> Path:
        """Where the numbers go."""
        return self.folder / "results.json"

    @property
    def plot(self) -> Path:
        """Where the picture goes."""
        return self.folder / "loss.png"

    def run(self, recipe: str, seed: int) -> Run:
        """The recorded run, or a new one."""
        run = Run(recipe=recipe, seed=seed)
        return self.runs.setdefault(run.name, run)

    def checkpoints(self, run: Run) -> Checkpoints:
        """The checkpoints of one run."""
        return Checkpoints(self._checkpoint_folder(run))

    def open(self, *, resume: bool, overwrite: bool) -> None:
        """Makes the folder ready; earlier runs are taken over, deleted or refused."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.results.exists():
                self._open_existing(resume=resume, overwrite=overwrite)
            self.save()
        except OSError as error:
            raise OutputError(f"cannot write to {self.folder}: {error.strerror}") from None
        except DiskError as error:
            raise OutputError(str(error)) from None

    def save(self) -> None:
        """Writes the results: whole or not at all, even if killed here."""
        if not is_first():
            return
        document = {
            "config": self._config(),
            "environment": self.environment,
            "runs": [self._entry(run) for run in self.runs.values()],
        }
        text = json.dumps(document, indent=1, allow_nan=False)
        replace("the results", self.results, lambda file: file.write(text.encode()))

    def _checkpoint_folder(self, run: Run) -> Path:
        return self.folder / "checkpoints" / run.name

    def _config(self) -> dict[str, Any]:
        return {**asdict(self.settings), "data_sha256": self.fingerprint}

    def _entry(self, run: Run) -> dict[str, Any]:
        return {
            **asdict(run),
            "final_validation_loss": run.final_loss,
            "tokens_per_second": run.tokens_per_second(self.settings),
        }

    def _open_existing(self, *, resume: bool, overwrite: bool) -> None:
        if not (resume or overwrite):
            raise OutputError(
                f"{self.folder} holds earlier runs; pass --resume to continue them, "
                "--overwrite to delete them, or another --out"
            )
        config, runs = self._load()
        if overwrite:
            # Only what this program recorded: the folder may hold other things.
            for run in runs:
                shutil.rmtree(self._checkpoint_folder(run), ignore_errors=True)
            return
        self._check_same(config)
        self.runs = {run.name: run for run in runs}

    def _load(self) -> tuple[dict[str, Any], list[Run]]:
        try:
            stored = json.loads(self.results.read_text(encoding="utf-8"))
            return stored["config"], [Run.from_dict(run) for run in stored["runs"]]
        except (ValueError, KeyError, TypeError):
            raise OutputError(
                f"{self.results} is not a results file of this program; choose another --out"
            ) from None

    def _check_same(self, earlier: dict[str, Any]) -> None:
        # Results from before these were settings had them so.
        earlier = {"heal": 0.0, "states": "float32", **earlier}
        changes = [
            f"{key}: {earlier.get(key)} then, {value} now"
            for key, value in self._config().items()
            if earlier.get(key) != value
        ]
        if changes:
            raise OutputError(
                f"{self.folder} was made with other settings ({'; '.join(changes)}); "
                "resume with the same ones, or choose another --out"
            )
