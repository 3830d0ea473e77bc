"""report of a run: one that diverges on purpose is diagnosed from its page alone."""

import html.parser
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import inspect
from mx_jax.inspect.report import Histogram, Table, findings, page
from tests.quick import quick

SECTIONS = [
    "Out of the ordinary",
    "Numbers",
    "SQNR by layer",
    "Error of products by layer",
    "Worst layers",
    "Saturation",
    "Scales",
]
TAG = inspect.Tag(path="a", product="output", side="lhs", axis=-1, format="mxfp4", rule="even")


class Page(html.parser.HTMLParser):
    """What a page holds: texts by tag, and its tags, each of which is closed."""

    def __init__(self, path: Path, sections: list[str]):
        super().__init__()
        self.text = path.read_text()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.tags: list[tuple[str, dict]] = []
        self.feed(self.text)
        assert self.open == [] and self.texts["h2"] == sections
        # Nothing is fetched and nothing runs.
        assert not [tag for tag, _ in self.tags if tag in ("script", "img", "iframe", "object")]
        assert "@import" not in self.text and "url(" not in self.text
        links = [v for _, own in self.tags for k, v in own.items() if k in ("src", "href")]
        assert links == ["data:,"] and "prefers-color-scheme: dark" in self.text
        parts = re.split(r"<h2>(.*?)</h2>", self.text)
        self.sections = dict(zip(parts[1::2], parts[2::2], strict=True))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)


def diverging_run(sink) -> None:
    """Two layers; the gain of one input channel of the second grows tenfold with each step."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, 64)).astype(np.float32)
    weights = tuple(rng.normal(size=(64, 64)).astype(np.float32) / 8 for _ in range(2))

    def loss(weights, step):
        gains = jnp.ones(64).at[37].set(10.0 ** step.astype(jnp.float32))
        with inspect.tag("up"):
            y = jnp.tanh(mx_jax.matmul(x, weights[0], recipe="mxfp4")) * gains
        with inspect.tag("down"):
            return jnp.mean(jnp.square(mx_jax.matmul(y, weights[1], recipe="mxfp4")))

    @quick
    def train_step(weights, step):
        with inspect.at_step(step):
            value, grads = jax.value_and_grad(loss)(weights, step)
            inspect.scalar("loss", value)
            return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)

    with inspect.capture(sink=sink):
        for step in range(8):
            weights = train_step(weights, step)


@pytest.mark.slow
def test_a_run_that_diverges_is_diagnosed_from_its_page(tmp_path):
    file, path = inspect.Jsonl(tmp_path / "run.jsonl"), tmp_path / "run.html"
    diverging_run(file)
    inspect.report(file.path, path, title="A <diverging> run")
    found = Page(path, SECTIONS)
    assert found.texts["h1"] == ["A <diverging> run"]
    said = found.texts["li"]
    outlier = next(line for line in said if "outlier" in line)
    assert re.fullmatch(
        r"down: the input of output \(mxfp4\) has an outlier: channel 37 is \d+ times the median, "
        r"first at step 2",
        outlier,
    ), said
    grown = next(i for i, line in enumerate(said) if line.startswith("loss is three times"))
    broken = next(i for i, line in enumerate(said) if "Inf or NaN" in line)
    assert max(said.index(outlier), grown) < broken, "what comes first in the run comes first"
    drawn = [tag for tag, _ in found.tags]
    assert drawn.count("polyline") > 10 and drawn.count("rect") > 10


def test_nothing_and_what_is_no_record(tmp_path):
    file = tmp_path / "run.jsonl"
    for text, message in (
        ("", "report: needs records, got none"),
        ('{"step": 3}\n', r"run\.jsonl, line 1: no record of a capture"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            inspect.report(file, tmp_path / "run.html")


def said(*stats: dict[str, float], tag: inspect.Tag = TAG) -> list[str]:
    """Sentences on steps of one operand, without where it is."""
    records = [inspect.Record(tag=tag, step=i, stats=own) for i, own in enumerate(stats)]
    return [sentence.partition(f"({tag.format}) ")[2] for sentence in findings(records, {})]


GOOD = {"saturation": 0.01, "underflow": 0.1, "outlier_ratio": 5.0, "sqnr_db": 20.0}


@pytest.mark.parametrize(
    ("steps", "sentences"),
    [
        ([GOOD, GOOD | {"sqnr_db": 15.0}], []),
        (
            [GOOD, GOOD | {"sqnr_db": 12.0, "underflow": 0.5}],
            [
                "loses 50% of its values to zero, first at step 1",
                "lost 8 dB of SQNR since its first step, first at step 1",
            ],
        ),
        # What a format always saturates is in order.
        ([{"saturation": 0.035}, {"saturation": 0.04}], []),
        (
            [{"saturation": 0.005}, {"saturation": 0.03}],
            ["saturates in 3.0% of its values, first at step 1"],
        ),
        ([{"saturation": 0.2}], ["saturates in 20.0% of its values, first at step 0"]),
    ],
)
def test_what_is_out_of_the_ordinary(steps, sentences):
    assert said(*steps) == sentences


def test_numbers_out_of_the_ordinary():
    numbers = [inspect.Scalar(name="loss", step=i, value=v) for i, v in enumerate((2.0, 1.0, 4.0))]
    assert findings([], {"loss": numbers}) == ["loss is three times its best from step 2 on"]


@pytest.mark.parametrize(
    ("layers", "rest"),
    [
        (1, ""),
        (2, "; so does [1]"),
        (3, "; so do [1], [2]"),
        (12, "; so do 11 other layers of its scan"),
    ],
)
def test_layers_of_a_scan_share_a_sentence(layers, rest):
    records = [
        inspect.Record(tag=TAG, step=step, index=(layer,), stats={"underflow": 0.5})
        for step in range(2)
        for layer in range(layers)
    ]
    text = "a[0]: the input of output (mxfp4) loses 50% of its values to zero, first at step 0"
    assert findings(records, {}) == [text + rest]


def test_scales_of_zeros_and_nan_do_not_stretch_a_histogram():
    def histogram(counts: dict[int, int]) -> str:
        text = page("", "", {"Scales": [Table((), [[Histogram(counts)]])]})
        return text[text.index("<td>") :]

    drawn = histogram({-127: 5, -3: 7, -2: 1, 128: 2})
    assert drawn.count("<rect") == 2 and 'width="70"' in drawn
    assert "5 at 2^-127, as zeros are, 2 with NaN" in drawn
    assert "<svg" not in histogram({-127: 5})
    wide = histogram({-100: 1, 100: 1})
    assert 300 < int(re.search(r'svg width="(\d+)"', wide)[1]) < 500  # pyright: ignore


def test_the_page_says_how_much_it_is_about(tmp_path):
    memory = inspect.Memory()
    shared: Any = {"path": "a", "product": "output", "format": "mxfp4", "rule": "even"}
    sides: Any = (("lhs", -1), ("rhs", -2), (None, None))
    for step in (0, 10):
        for side, axis in sides:
            tag = inspect.Tag(side=side, axis=axis, **shared)
            memory.write(inspect.Record(tag=tag, step=step, stats={"amax": 1.0}))
    inspect.report(memory, tmp_path / "run.html")
    text = Page(tmp_path / "run.html", SECTIONS).text
    assert "<p>2 steps, 0 to 10; 2 operands of 1 products</p>" in text
