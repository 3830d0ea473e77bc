"""Trains one small language model in float32 and in microscaling recipes, and compares them.

    python examples/train_lm.py --quick --out look            # in about a minute
    python examples/train_lm.py                               # float32, mxfp8 and mxfp4
    python examples/train_lm.py --resume                      # after Ctrl-C, or a crash
    python examples/train_lm.py --resume --recipes nvfp4,mxfp4_backward --seeds 0,1,2   # adds runs
    python examples/train_lm.py --resume --recipes all        # adds every named recipe
    python examples/train_lm.py --heal 0.1 --out healed       # last tenth in high precision
    python examples/train_lm.py --states mxfp8 --out states   # Adam's moments in 8 bits
    python examples/train_lm.py --data book.txt --out book    # on your own text
    python examples/train_lm.py --mesh data=2,fsdp=2,model=2  # on 8 devices, virtual ones on a CPU
    python examples/train_lm.py --mesh data=2,fsdp=2,model=2 --processes 4      # in 4 processes

A seed fixes the initial parameters and the order of the data for every recipe, so runs with the
same seed differ only in their arithmetic. The linear layers inside the blocks follow the recipe;
embedding, head, norms and attention products do not. Rounding alone changes the loss by up to one
percent in either direction, so compare smaller gaps over several seeds.

Ctrl-C saves a checkpoint first. If the newest checkpoint is damaged, --resume goes back to the one
before. When one of several processes is lost, the others end, and --resume goes on from the newest
checkpoint. Exit status: 0 if all is well, 1 if a run diverged, 2 for wrong options, 3 if a file
could not be written or read, 4 if a process was lost, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import platform
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import jax
import numpy as np
from lm.cli import CommandLine
from lm.data import Corpus, DataError, file_text, standard_library_text
from lm.disk import DiskError
from lm.launch import LOST, Launch, resuming
from lm.mesh import any_says, check_fits, is_first, make_mesh, wait_for_all
from lm.model import generate
from lm.report import print_sample, print_table, save_plot
from lm.settings import Settings
from lm.storage import Output, OutputError, Run
from lm.training import Interrupted, Trainer, stop_request
from rich.console import Console

import mx_jax

# Exit statuses, beside 0 and argparse's 2 for wrong options.
DIVERGED = 1
NO_DISK = 3
STOPPED = 130

DEFAULT_RECIPES = ("float32", "mxfp8", "mxfp4")
DEFAULT = Settings(
    # model: 0.8 million parameters
    d_model=128,
    layers=4,
    heads=4,
    context=64,
    # training: with far fewer steps every recipe still knows letter pairs only
    batch=16,
    steps=800,
    lr=3e-3,
    weight_decay=0.1,
    grad_clip=1.0,
    # validation: on the same characters every time
    eval_every=100,
    eval_tokens=32768,
)
QUICK = dataclasses.replace(
    DEFAULT, d_model=64, layers=2, heads=2, steps=250, lr=1e-2, eval_every=50, eval_tokens=16384
)


def load_corpus(path: Path | None, settings: Settings) -> Corpus:
    """The text of a file, or Python's own, split for `settings`."""
    text = standard_library_text() if path is None else file_text(path)
    return Corpus.from_text(text, batch=settings.batch, context=settings.context)


def environment(data: Path | None) -> dict[str, str]:
    """The environment of the results."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    return {
        "data": str(data or "Python's standard library"),
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        "mx_jax": mx_jax.__version__,
        **{package: metadata.version(package) for package in packages},
    }


def train_all(
    output: Output, corpus: Corpus, arguments: argparse.Namespace, console: Console
) -> None:
    """Trains whatever has not ended yet, seed by seed, so that recipes can be compared early."""
    with stop_request() as stop:
        for seed in arguments.seeds:
            for recipe in arguments.recipes:
                run = output.run(recipe, seed)
                if run.ended:
                    console.print(f"{run.label}: already done")
                else:
                    every = arguments.checkpoint_every
                    train_one(run, output, corpus, every, lambda: any_says(stop()))


def train_one(
    run: Run, output: Output, corpus: Corpus, checkpoint_every: int, stop: Callable[[], bool]
) -> None:
    """Trains one run and records how far it came, whatever happens."""
    # Before the first checkpoint too: it must never lie there without its settings.
    output.save()
    with output.checkpoints(run) as checkpoints:
        trainer = Trainer(run, output.settings, corpus, checkpoints)
        output.runs[run.name] = trainer.run
        try:
            trainer.train(checkpoint_every=checkpoint_every, stop=stop)
        finally:
            output.save()


def write_sample(
    run: Run, output: Output, corpus: Corpus, prompt: np.ndarray, length: int, console: Console
) -> None:
    """Lets the model of a finished run continue the prompt; every recipe throws the same dice."""
    with output.checkpoints(run) as checkpoints:
        trainer = Trainer(run, output.settings, corpus, checkpoints)
    if trainer.run.step < output.settings.steps:
        console.print(f"{run.label}: no sample, since its last checkpoint is lost")
        return
    params, model = trainer.state.params, trainer.model
    tokens = generate(params, prompt, jax.random.key(0), model=model, length=length)
    print_sample(console, run.label, corpus.decode(prompt), corpus.decode(np.asarray(tokens)))


def report(output: Output, console: Console) -> None:
    """The table in the terminal, the picture and the numbers in the folder."""
    if is_first():
        save_plot(output.plot, output.runs.values(), output.settings)
    print_table(console, output.runs.values(), output.settings)
    console.print(f"numbers: {output.results}\nplot:    {output.plot}")


def run(output: Output, corpus: Corpus, prompt: np.ndarray, arguments: argparse.Namespace) -> int:
    """Trains, reports, samples; returns the exit status."""
    console = Console(markup=False, highlight=False)
    console.print(
        f"{len(corpus.train):,} characters to train on, {len(corpus.validation):,} to validate; "
        f"vocabulary {len(corpus.vocabulary)}; {jax.devices()[0].device_kind}"
    )
    try:
        train_all(output, corpus, arguments, console)
    except Interrupted:
        report(output, console)
        return STOPPED
    report(output, console)
    chosen = [output.run(recipe, arguments.seeds[0]) for recipe in arguments.recipes]
    for finished in (run for run in chosen if run.finished and arguments.sample):
        write_sample(finished, output, corpus, prompt, arguments.sample, console)
    return DIVERGED if any(run.diverged_at is not None for run in output.runs.values()) else 0


def open_output(output: Output, arguments: argparse.Namespace) -> None:
    """Makes the folder ready in one process; then the others read it."""
    if is_first():
        output.open(resume=arguments.resume, overwrite=arguments.overwrite)
    wait_for_all("output")
    if not is_first():
        output.open(resume=True, overwrite=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program, in as many processes as wanted, and returns its exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        launch = Launch.parse(argv)
    except ValueError as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        return 2
    if launch.starts_others:
        return launch.start_all(argv)
    if launch.processes == 1:
        return work(argv, launch)
    launch.watch_starter()
    try:
        status = work(argv, launch)
    except jax.errors.JaxRuntimeError as error:
        why = f"lost another process: {str(error).partition(chr(10))[0]}"
        if launch.was_started:
            # Who started all of them says it; why is in the log.
            launch.note(why)
        else:
            print(f"{why}; to continue: {resuming(argv)}", file=sys.stderr)
        status = LOST
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        # A regular end would wait for processes that may be gone.
        os._exit(status)
    return status


def work(argv: Sequence[str], launch: Launch) -> int:
    """The work of one process."""
    launch.join()
    command_line = CommandLine(__doc__ or "", default=DEFAULT, quick=QUICK, recipes=DEFAULT_RECIPES)
    arguments, settings = command_line.parse(argv)
    mesh = contextlib.nullcontext()
    try:
        if launch.mesh is not None:
            check_fits(launch.mesh, settings)
            mesh = jax.set_mesh(make_mesh(launch.mesh))
        corpus = load_corpus(arguments.data, settings)
        prompt = corpus.encode(arguments.prompt) if arguments.prompt else corpus.validation[:32]
        output = Output(
            folder=arguments.out,
            settings=settings,
            fingerprint=corpus.fingerprint,
            environment=environment(arguments.data),
        )
        open_output(output, arguments)
    except (DataError, OutputError, ValueError) as error:
        command_line.fail(error)
    # Accelerators otherwise multiply float32 with fewer bits, and the baseline would not be one.
    with mesh, jax.default_matmul_precision("float32"):
        try:
            status = run(output, corpus, prompt, arguments)
        except KeyboardInterrupt:  # a second Ctrl-C: at once, from the newest checkpoint
            status = STOPPED
        except DiskError as error:
            print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
            status = NO_DISK
    if status in (STOPPED, NO_DISK):
        print(f"stopped; to continue: {resuming(argv)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
