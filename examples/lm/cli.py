"""The command line of `train_lm.py`: options, presets, and the messages for wrong ones."""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from .launch import OUT, add_options
from .settings import ENDS, Settings, aliases, known_recipes, precision


def recipe_list(text: str) -> list[str]:
    """`a,b` or `all` as names, or an error that lists the known ones."""
    known = known_recipes()
    names = known if text == "all" else [name.strip() for name in text.split(",")]
    names = [_resolved(name) for name in names]
    unknown = [name for name in names if name.removesuffix(ENDS) not in known]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"unknown recipe {', '.join(map(repr, unknown))}; "
            f"known: {', '.join((*known, *aliases()))}, each with {ENDS} too, or all"
        )
    return list(dict.fromkeys(names))


def _resolved(name: str) -> str:
    base = name.removesuffix(ENDS)
    return aliases().get(base, base) + name[len(base) :]


def check_quantizes(recipes: Sequence[str], settings: Settings) -> None:
    """Refuses recipes that keep every block in high precision: they would be float32 by a name."""
    for name in recipes:
        high = {block % settings.layers for block in precision(name).high_blocks}
        if len(high) == settings.layers:
            raise ValueError(
                f"{name} keeps the first and the last block in high precision, and nothing lies "
                f"between them, got layers={settings.layers}; pass --layers 3 or more"
            )


def seed_list(text: str) -> list[int]:
    """`0,1,2` as numbers."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) < 2**31 for part in parts):
        raise argparse.ArgumentTypeError(
            f"seeds are whole numbers below 2**31, as in 0,1,2; got {text!r}"
        )
    return list(dict.fromkeys(map(int, parts)))


def at_least(smallest: int) -> Callable[[str], int]:
    """An argument type: whole numbers from `smallest` on."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"needs a whole number >= {smallest}, got {text!r}")
        return int(text)

    return number


class CommandLine:
    """A parser of arguments into options and settings."""

    def __init__(
        self, document: str, *, default: Settings, quick: Settings, recipes: Sequence[str]
    ) -> None:
        title, _, details = document.partition("\n\n")
        self._presets = {False: default, True: quick}
        self._parser = argparse.ArgumentParser(
            usage="%(prog)s [options]",
            # The message after Ctrl-C repeats the options, which must be spelt out for that.
            allow_abbrev=False,
            description=title,
            epilog=details,
            formatter_class=argparse.RawTextHelpFormatter,
        )
        self._add_work(recipes)
        self._add_output()
        add_options(self._parser.add_argument_group("where to train"))
        self._add_settings()

    def parse(self, argv: Sequence[str]) -> tuple[argparse.Namespace, Settings]:
        """Options and settings; exits with status 2 and a message if they make no sense."""
        arguments = self._parser.parse_args(argv)
        preset = self._presets[arguments.quick]
        options = {name: getattr(arguments, name) for name in vars(preset)}
        changes = {name: value for name, value in options.items() if value is not None}
        try:
            settings = dataclasses.replace(preset, **changes)
            check_quantizes(arguments.recipes, settings)
        except ValueError as error:
            self.fail(error)
        return arguments, settings

    def fail(self, error: Exception) -> NoReturn:
        """Exits with status 2 and the error as the message."""
        self._parser.error(str(error))

    def _add_work(self, recipes: Sequence[str]) -> None:
        add = self._parser.add_argument_group("what to train").add_argument
        add(
            "--recipes",
            type=recipe_list,
            default=list(recipes),
            metavar="A,B,...",
            help="number formats to train in: all, or a list of\n"
            + textwrap.fill(", ".join(known_recipes()), width=70)
            + f"\n(default {','.join(recipes)});\n"
            f"with {ENDS}, as mxfp4{ENDS}: first and last block in high precision",
        )
        add("--seeds", type=seed_list, default=[0], metavar="0,1,...", help="seeds (default 0)")
        add(
            "--data",
            type=Path,
            metavar="FILE",
            help="UTF-8 text to train on (default: Python's own docs)",
        )
        add("--quick", action="store_true", help="a smaller model and fewer steps: about a minute")

    def _add_output(self) -> None:
        group = self._parser.add_argument_group("what to write")
        group.add_argument(
            "--out",
            type=Path,
            default=OUT,
            metavar="FOLDER",
            help="folder for results.json, loss.png and checkpoints\n(default ./train_lm_out)",
        )
        earlier = group.add_mutually_exclusive_group()
        earlier.add_argument(
            "--resume", action="store_true", help="continue or add to the runs in --out"
        )
        earlier.add_argument("--overwrite", action="store_true", help="delete the runs in --out")
        group.add_argument(
            "--checkpoint-every",
            type=at_least(1),
            default=100,
            metavar="N",
            help="optimizer steps between checkpoints (default 100)",
        )
        group.add_argument(
            "--sample",
            type=at_least(0),
            default=200,
            metavar="N",
            help="characters of text that each model writes at the end (default 200)",
        )
        group.add_argument(
            "--prompt",
            metavar="TEXT",
            help="text for them to continue (default: start of the validation text)",
        )

    def _add_settings(self) -> None:
        group = self._parser.add_argument_group("settings (default; value with --quick)")
        for setting in dataclasses.fields(Settings):
            default, quick = (getattr(self._presets[i], setting.name) for i in (False, True))
            group.add_argument(
                "--" + setting.name.replace("_", "-"),
                type=type(default),
                metavar="N" if isinstance(default, int) else "X",
                help=f"{setting.metadata['help']} ({default}; {quick})",
            )
