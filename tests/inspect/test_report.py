"""report: a run that diverges on purpose is diagnosed from its page alone; of a checkpoint what is
worst stands first, whoever wrote the file.
"""

import html.parser
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import mx_jax
from mx_jax import checkpoint, inspect
from mx_jax.checkpoint.weights import Weights
from mx_jax.formats import MXFP4
from mx_jax.inspect.report import findings
from mx_jax.mxarray import MXArray
from tests.checkpoint.gguf_bytes import Tensor, gguf

OF_A_RUN = [
    "Out of the ordinary",
    "Numbers",
    "SQNR by layer",
    "Error of products by layer",
    "Worst layers",
    "Saturation",
    "Scales",
]
OF_A_CHECKPOINT = [
    "Out of the ordinary",
    "Formats",
    "Error by tensor",
    "Worst tensors",
    "Saturation",
    "Zeros",
    "Scales",
    "Tensors",
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
        with jax.named_scope("up"):
            y = jnp.tanh(mx_jax.matmul(x, weights[0], recipe="mxfp4")) * gains
        with jax.named_scope("down"):
            return jnp.mean(jnp.square(mx_jax.matmul(y, weights[1], recipe="mxfp4")))

    def train_step(weights, step):
        value, grads = jax.value_and_grad(loss)(weights, step)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    run = inspect.capture(train_step, sink=sink)
    for step in range(8):
        weights, value = run(weights, np.int32(step))
        run.scalar("loss", value)
    run.close()


@pytest.mark.slow
def test_a_run_that_diverges_is_diagnosed_from_its_page(tmp_path):
    file, path = inspect.Jsonl(tmp_path / "run.jsonl"), tmp_path / "run.html"
    diverging_run(file)
    inspect.report(file.path, path, title="A <diverging> run")
    found = Page(path, OF_A_RUN)
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


# Checkpoints ------------------------------------------------------------------------------------

UP, HEAD, NORM = "layers.{}.up.weight", "head.weight", "norm.weight"


def quantized(codes: Any, exponents: Any) -> MXArray:
    """MXFP4 of given codes: nothing is rounded, so the test knows every number of the page."""
    return MXArray(
        codes=np.asarray(codes, np.uint8),
        scales=np.asarray(exponents, np.int16).astype(np.uint8) + np.uint8(127),
        format=MXFP4,
        blocks=((-1, 32),),
        dtype=np.dtype(np.float32),
    )


def layers() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Three layers and a head, and what they should be: layer 1 lost most, layer 2 has zeros."""
    rng = np.random.default_rng(0)
    small: dict[str, Any] = {}
    for layer, zeros in enumerate((0, 0, 40)):
        codes = rng.choice([1, 2, 3, 4, 5, 6], (2, 64))
        codes[:, 64 - zeros :] = 0
        codes[0, 0] = 7
        small[UP.format(layer)] = quantized(codes, [[-1, -2], [-1, -3]])
    small[HEAD] = quantized(np.full((1, 32), 7), [[0]])
    exact = {name: np.asarray(x.dequantize()) for name, x in small.items()}
    for layer, factor in enumerate((1.01, 1.5, 1.01)):
        exact[UP.format(layer)] = exact[UP.format(layer)] * np.float32(factor)
    small[NORM] = exact[NORM] = np.full(8, 1.5, np.float32)
    return small, exact


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("weights")
    small, exact = layers()
    checkpoint.save(folder / "small.safetensors", small)
    safetensors.numpy.save_file(exact, folder / "exact.safetensors")
    return folder / "small.safetensors", folder / "exact.safetensors"


@pytest.fixture
def page_of(tmp_path: Path):
    """Writes a page, and gives what its sections hold."""

    def write(source: Any, **options: Any) -> dict[str, str]:
        inspect.report(source, tmp_path / "page.html", **options)
        return Page(tmp_path / "page.html", OF_A_CHECKPOINT).sections

    return write


def rows(section: str) -> list[list[str]]:
    found = re.findall(r"<tr>(.*?)</tr>", section.split("<tbody>")[1])
    return [re.findall(r"<td>(.*?)</td>", row) for row in found]


def test_what_lost_most_stands_first(files: tuple[Path, Path], page_of: Any, tmp_path: Path):
    small, exact = files
    page = page_of(small, reference=exact, title="Three <layers>")
    text = (tmp_path / "page.html").read_text()
    assert "<h1>Three &lt;layers&gt;</h1>" in text
    assert f"5 tensors, {1 * 3 * 68 + 17 + 32} B; 5 compared with those of the same name" in text
    worst = rows(page["Worst tensors"])
    # 1 - 1 / 1.5 of the amplitude is noise, or 1 - 1 / 1.01.
    ten = [f"{-20 * math.log10(1 - 1 / factor):.2f}" for factor in (1.5, 1.01, 1.01)]
    assert [row[-1] for row in worst] == ten and worst[0][0] == UP.format(1)
    assert "2 of 5 tensors are equal to the reference" in page["Error by tensor"]
    assert page["Error by tensor"].count("<circle") == 3
    assert f"<title>layers.*.up.weight, layer 1: {9.542:.4g}</title>" in page["Error by tensor"]
    assert re.findall("<li>(.*?)</li>", page["Out of the ordinary"]) == [
        "head.weight: 100.0% of the codes have the largest magnitude of their format",
        "layers.1.up.weight: its SQNR is 9.5 dB, the median of mxfp4 (mx_jax) 40.1 dB",
        "layers.2.up.weight: 62% of its values are zero, the median of mxfp4 (mx_jax) is 0%",
    ]
    assert rows(page["Formats"])[0] == ["mxfp4 (mx_jax)", "4", "416", "221 B", "4.25", "40.09"]


def test_maps_and_histograms(files: tuple[Path, Path], page_of: Any):
    page = page_of(files[0])
    for name in ("Error by tensor", "Worst tensors"):
        assert "no reference was given" in page[name] and "<svg" not in page[name]
    head, up = rows(page["Saturation"])
    assert (head[0], head[2:]) == (HEAD, ["", "", ""]) and 'title="100.000%">100<' in head[1]
    assert (up[0], up[1]) == ("layers.*.up.weight", "")
    assert all(f'title="{1 / 128:.3%}">0.78<' in cell for cell in up[2:])
    up, *others = rows(page["Zeros"])
    assert [re.sub("<.*?>", "", cell) for cell in up] == ["layers.*.up.weight", "", "0", "0", "62"]
    assert {row[0] for row in others} == {HEAD, NORM}
    # A bar for each exponent, of the layers together.
    (up, head) = rows(page["Scales"])
    assert up[:3] == ["layers.*.up.weight", "mxfp4 (mx_jax)", "3"]
    assert re.findall("<title>(.*?)</title>", up[3]) == ["2^-3: 3", "2^-2: 3", "2^-1: 6"]
    assert len(rows(page["Tensors"])) == 5


def test_a_reference_in_any_form(files: tuple[Path, Path], tmp_path: Path):
    small, exact = files
    out, texts = tmp_path / "page.html", []
    arrays = safetensors.numpy.load_file(exact)
    sources = (small, str(small), checkpoint.read(small))
    for source, reference in zip(sources, (exact, checkpoint.read(exact), arrays), strict=True):
        inspect.report(source, out, reference=reference)
        texts.append(out.read_text().replace("the given arrays", str(exact)))
    assert len(set(texts)) == 1 and f"<h1>{small}</h1>" in texts[0]
    del arrays[NORM]
    inspect.report(small, out, reference=arrays)
    assert "; 4 compared" in out.read_text()
    with pytest.raises(ValueError, match=r"report: head\.weight: sqnr_db: shapes must agree"):
        inspect.report(small, out, reference=arrays | {HEAD: np.ones(3)})


def test_a_folder_and_gguf(page_of: Any, tmp_path: Path):
    folder = tmp_path / "model"
    small, _ = layers()
    del small[NORM]
    checkpoint.write(folder, small, layout="mxfp4-pack-quantized", max_shard_size=100)
    assert rows(page_of(folder)["Formats"])[0][:2] == ["mxfp4 (mxfp4-pack-quantized)", "4"]
    file = tmp_path / "nameless"
    file.write_bytes(gguf({"blk.0.up.weight": Tensor(39, (64, 2), (b"\x7f" + bytes(16)) * 4)}))
    tensor = ["blk.0.up.weight", "mxfp4 (gguf-mxfp4)", "2x64"]
    assert rows(page_of(file)["Tensors"])[0][:3] == tensor


def test_what_there_is_no_page_of(files: tuple[Path, Path], tmp_path: Path):
    out = tmp_path / "page.html"
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(files[0].read_bytes()[:-8])
    for source, reference, error, message in (
        (Weights(tmp_path, {}), None, ValueError, "report: needs tensors, got none in Weights"),
        (
            inspect.Memory(),
            files[1],
            ValueError,
            "report: a reference belongs to a checkpoint",
        ),
        (tmp_path / "none.safetensors", None, FileNotFoundError, r"none\.safetensors"),
        (cut, None, ValueError, r"cut\.safetensors"),
    ):
        with pytest.raises(error, match=message):
            inspect.report(source, out, reference=reference)
    assert not out.exists()
