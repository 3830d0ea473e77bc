"""docs/migrate.md: our names exist, theirs do too, and none of theirs is left out."""

import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import jax
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "migrate.md"
ROW = re.compile(r"^\| (.*?) \| (.*) \|$", re.MULTILINE)
OURS = re.compile(r"\bmx_jax(?:\.\w+)+")
# Flax's own names for it all begin so; its functions below the layers are no way in.
FLAX_FLOAT8 = re.compile(r"Fp8\w+Op|Fp8DotGeneral|Fp8Einsum|NANOOFp8\w+")


def sections(text: str) -> dict[str, list[tuple[str, str]]]:
    """Rows of each table, theirs and ours, by the section's anchor."""
    parts = re.split(r"^## .* \{ #(\S+) \}$", text, flags=re.MULTILINE)
    return {
        anchor: [row for row in ROW.findall(body) if not set(row[0]) <= set("-|")][1:]
        for anchor, body in zip(parts[1::2], parts[2::2], strict=True)
    }


SECTIONS = sections(PAGE.read_text())


def resolve(name: str) -> Any:
    """What a dotted name is, of a package that is installed."""
    first, *rest = name.split(".")
    found: Any = importlib.import_module(first)
    for depth, part in enumerate(rest, 1):
        if inspect.ismodule(found) and not hasattr(found, part):
            importlib.import_module(".".join([first, *rest[:depth]]))
        found = getattr(found, part)
    return found


def their_names(anchor: str) -> set[str]:
    """What stands in code marks on the left: names, without what they are called with."""
    spans = [span for left, _ in SECTIONS[anchor] for span in re.findall(r"`([^`]+)`", left)]
    return {match[0] for span in spans if (match := re.match(r"[A-Za-z_][\w.]*", span))}


def words_on_the_left(anchor: str) -> set[str]:
    return set(re.findall(r"\w+", " ".join(left for left, _ in SECTIONS[anchor])))


def test_tables_are_found():
    assert set(SECTIONS) == {
        "torchao-mx",
        "torchao-training",
        "torchao-float8",
        "torchmx",
        "qwix",
        "jax-nn",
        "flax",
        "transformerengine",
    }
    assert all(len(rows) >= 3 for rows in SECTIONS.values())


@pytest.mark.parametrize("name", sorted(set(OURS.findall(PAGE.read_text()))))
def test_our_names_exist(name: str):
    resolve(name)


def test_flax_is_complete():
    linen = importlib.import_module("flax.linen")
    theirs = {name for name in dir(linen) if FLAX_FLOAT8.fullmatch(name)}
    assert theirs == their_names("flax")


def test_jax_is_complete():
    theirs = {name for name in dir(jax.nn) if "scaled_" in name}
    assert theirs == their_names("jax-nn")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("anchor", "package"),
    [
        ("torchao-mx", "torchao.prototype.mx_formats"),
        ("torchao-training", "torchao.prototype.moe_training"),
        ("torchao-training", "torchao.prototype.moe_training.ep"),
        ("torchao-float8", "torchao.float8"),
        ("qwix", "qwix"),
    ],
)
def test_peers_are_complete(anchor: str, package: str):
    module = pytest.importorskip(package)
    public = getattr(module, "__all__", None) or {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and (callable(value) or inspect.isclass(value))
    }
    assert set(public) - words_on_the_left(anchor) == set()


# Fields, functions' arguments and other places, which stand on the page as they are written there.
NOT_DOTTED = {
    "torchao-mx": {"benchmarks", "KernelPreference", "fp_format_spec"},
    "torchao-training": {
        "scale_calculation_mode",
        "out_dtype",
        "pad_token_groups_for_grouped_mm",
        # Their packages import triton, which a machine without a GPU does not have.
        "nvfp4_training.nvfp4_linear",
        "nvfp4_training.nvfp4_training.NVFP4Linear",
        "nvfp4_training.nvfp4_training.NVFP4TrainingConfig",
        "nvfp4_training.nvfp4_tensor_parallel.NVFP4ColwiseParallel",
        "nvfp4_training.nvfp4_tensor_parallel.NVFP4RowwiseParallel",
        "blockwise_fp8_training.linear.Float8BlockwiseLinear",
        "blockwise_fp8_training.linear.Float8BlockwiseLinearConfig",
        "ep.a2a_dispatch_mxfp8_fwd_hp_bwd",
        "ep.permute_mxfp8_fwd_hp_bwd",
        "ep.unpermute_hp_fwd_mxfp8_bwd",
        "ep.a2a_combine_hp_fwd_mxfp8_bwd",
    },
    "torchao-float8": {
        "enable_fsdp_float8_all_gather",
        "force_recompute_fp8_weight_in_bwd",
        "pad_inner_dim",
        "emulate",
    },
    # Of the main branch, after 0.1.8.
    "qwix": {"BoxedParamProvider"},
}
# Where a name of a table may lie.
PLACES = {
    "torchao-mx": (
        "torchao.prototype.mx_formats.",
        "torchao.prototype.mx_formats.mx_tensor.",
        "torchao.prototype.mx_formats.nvfp4_tensor.",
        "torchao.prototype.",
        "",
    ),
    "torchao-training": (
        "torchao.prototype.moe_training.",
        "torchao.quantization.",
    ),
    "torchao-float8": ("torchao.float8.", "torchao.float8.config."),
    "qwix": ("qwix.",),
}


@pytest.mark.slow
@pytest.mark.parametrize("anchor", PLACES)
def test_their_names_exist(anchor: str):
    pytest.importorskip(PLACES[anchor][0].split(".")[0])
    for name in their_names(anchor) - NOT_DOTTED[anchor]:
        for place in PLACES[anchor]:
            try:
                resolve(place + name)
            except (AttributeError, ImportError):
                continue
            break
        else:
            raise AssertionError(f"{anchor}: {name} is nowhere in {PLACES[anchor]}")


@pytest.mark.slow
def test_names_of_torchmx_exist():
    """From its sources: it imports with an old torchao only."""
    found = importlib.util.find_spec("torchmx")
    if found is None or found.origin is None:
        pytest.skip("torchmx is not installed")
    root = Path(found.origin).parent
    for name in their_names("torchmx"):
        *modules, last = name.split(".")
        if root.joinpath(*modules, f"{last}.py").exists():
            continue
        # What is no module's name is a method of its tensor.
        file = root.joinpath(*modules).with_suffix(".py")
        source = (file if file.exists() else root / "mx_tensor.py").read_text()
        assert re.search(rf"^( *def|class) {last}\b|^{last} = ", source, re.MULTILINE), name
