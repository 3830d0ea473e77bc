"""`python -m mx_jax plan`."""

import re
from pathlib import Path

import pytest

from mx_jax.plan.command import INTERCONNECTS
from tests.cli.conftest import Cli

WIDTH = ["plan", "--params", "1e9", "--layers", "16", "--width", "2048"]
SMALL = [*WIDTH, "--mesh", "data=2,fsdp=4,model=2"]
EXPERTS = ["--experts", "8", "--hidden", "512"]
PAGE = Path(__file__).parents[2] / "docs" / "sharding.md"


def test_recipes_side_by_side(cli: Cli):
    text, _ = cli(*SMALL, "--recipe", "mxfp8,nvfp4")
    for word in ("bfloat16", "mxfp8", "nvfp4", "parameters", "optimizer", "residuals"):
        assert word in text
    for row in ("all-gather", "reduce-scatter", "all-reduce"):
        assert row in text
    ratios = re.search(r"of bfloat16's\W+([\d.]+)\W+([\d.]+)\W+([\d.]+)", text)
    assert ratios is not None
    own, eight, four = (float(ratio) for ratio in ratios.groups())
    assert own == 1 > eight > four
    assert "Assumed: hidden=" in text
    assert "time" not in text


def test_json_is_the_same_unrounded(cli: Cli):
    found = cli.json(*SMALL, "--recipe", "mxfp4")
    plain, four = found["recipes"]
    assert [plain["name"], four["name"]] == ["bfloat16", "mxfp4"]
    for each in (plain, four):
        assert each["received"] == sum(row["bytes"] for row in each["traffic"])
        assert each["memory"]["total"] == sum(
            size for name, size in each["memory"].items() if name != "total"
        )
        assert each["seconds"] is None
    rows = [row for row in four["traffic"] if row["as_codes"]]
    assert [(row["axis"], row["tensor"], row["pass"]) for row in rows] == [
        ("fsdp", "weight", "forward"),
        ("fsdp", "weight", "backward"),
    ]
    assert rows[0]["as_codes"] == ["qkv", "out", "gate_up", "down"]
    # Parameters and two moments of 1e9 float32 numbers on 8 devices of 16.
    assert four["memory"]["optimizer"] == pytest.approx(1e9 / 8 * 8, rel=0.02)


def test_time_says_what_it_assumes(cli: Cli):
    words = ["--interconnect", "fsdp=ndr", "--interconnect", "model=1e12", "--efficiency", "0.5"]
    found = cli.json(*SMALL, "--recipe", "mxfp8", *words)
    for each in found["recipes"]:
        rates = {"fsdp": 50e9, "model": 1e12}
        expected = sum(
            row["bytes"] / rates[row["axis"]] / 0.5
            for row in each["traffic"]
            if row["axis"] in rates
        )
        assert each["seconds"] == pytest.approx(expected)
    text = " ".join(found["assumptions"])
    assert "fsdp: 50 GB/s (InfiniBand NDR, 400 Gb/s, a port a GPU)." in text
    assert "model: 1000 GB/s (as given)." in text
    assert "Time: 50% of these rates" in text and "no latency; not along data." in text


def test_what_moves_as_values_is_said(cli: Cli):
    """Not 2048 features in 128 shards of 16, which agree on their blocks."""
    said = " are gathered along fsdp as values in the forward pass: the recipe keeps them in high"
    for recipe, is_said in (("mxfp4", False), ("mxfp4_backward", True)):
        text, _ = cli(*WIDTH, "--mesh", "fsdp=128", "--recipe", recipe)
        assert (said in text) is is_said


def test_gather_none_and_sequence_parallel(cli: Cli):
    (_, codes) = cli.json(*SMALL, "--recipe", "nvfp4")["recipes"]
    (plain, values) = cli.json(*SMALL, "--recipe", "nvfp4", "--gather", "none")["recipes"]
    assert values["received"] == plain["received"] > codes["received"]
    words = ["--recipe", "nvfp4", "--gather", "fsdp,model", "--sequence-parallel"]
    (_, every) = cli.json(*SMALL, *words)["recipes"]
    assert {row["axis"] for row in every["traffic"] if row["as_codes"]} == {"fsdp", "model"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mesh", "rows=2"], "mesh must name axes of data, fsdp, expert, model"),
        (["--mesh", "fsdp=2,fsdp=2"], "mesh must name axes of data, fsdp, expert, model"),
        (["--mesh", "fsdp=0"], "got mesh='fsdp=0'; e.g. data=4,fsdp=64,model=8"),
        (["--tokens", "1001"], "fsdp=4, expert=1 and microbatches=1; pass a multiple of 8"),
        (["--recipe", "mxfp5"], "unknown recipe name='mxfp5'"),
        (["--gather", "rack"], "axes of data, fsdp, expert, model, pipe, got gather='rack'"),
        (["--interconnect", "fsdp=wire"], "unknown interconnect='wire'; known: nvlink3"),
        (["--interconnect", "fsdp=-1"], "unknown interconnect='-1'"),
        (["--interconnect", "rack=ndr"], "got interconnect='rack'"),
        (["--efficiency", "1.5"], "efficiency must be in (0, 1], got 1.5"),
        (["--tokens", "0"], "--tokens must be finite and at least 1, got 0.0"),
        (["--width", "-1"], "--width must be finite and at least 1, got -1"),
        (["--params", "inf"], "--params must be finite and at least 1, got inf"),
        (["--vocabulary", "-1"], "--vocabulary must be at least 0, got -1"),
        (["--experts-per-token", "2"], "experts_per_token=2, experts=1"),
        (["--width", "65536"], "nothing is left for the MLP, got params="),
        (["--hidden", "65536"], "more than params=1,000,000,000"),
        (["--mesh", "expert=4"], "of which the model has none, got expert=4; pass --experts, or"),
        (
            [*EXPERTS, "--mesh", "expert=3", "--tokens", "12"],
            "got experts=8 with expert=3; pass a size that divides",
        ),
        ([*EXPERTS, "--sequence-parallel"], "got --sequence-parallel with experts=8, model=2"),
        (["--microbatches", "2"], "microbatches go through the stages of a pipeline, got microbat"),
        (
            ["--mesh", "pipe=2", "--microbatches", "7"],
            "for data=1, fsdp=1, expert=1 and microbatches=7; pass a",
        ),
        (["--mesh", "pipe=3"], "pipeline has as many blocks, got layers=16 for pipe=3; pass"),
    ],
)
def test_wrong_words(words: list[str], message: str, cli: Cli):
    assert message in cli.error(*SMALL, *words)


def test_help_has_an_example_that_runs(cli: Cli, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        cli("plan", "--help")
    text = capsys.readouterr().out
    for name in INTERCONNECTS:
        assert name in text
    example = text[text.rindex("python -m mx_jax plan") :].replace("\\\n", " ").split()
    assert "1024 devices (data=2, fsdp=64, model=8)" in cli(*example[3:])[0]


def test_the_page_shows_what_is_printed(cli: Cli):
    page = PAGE.read_text()
    commands = re.findall(r"```bash\n(python -m mx_jax plan .*?)```", page, re.DOTALL)
    blocks = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert (len(commands), len(blocks)) == (3, 1)
    printed = [cli(*command.replace("\\\n", " ").split()[3:])[0] for command in commands]
    assert [line.rstrip() for line in blocks[0].splitlines()] == [
        line.rstrip() for line in printed[0].splitlines()
    ]
    # What the page says of the other two.
    for text, quoted in ((printed[1], ("1,081.7 ms", "672.8 ms")), (printed[2], ("419 GB",))):
        assert all(number in text for number in quoted)
    assert "idle in 7 of 23 steps" in printed[2] and "537 MB" in printed[2]
