"""Files that say something beside tensors: tokenizers, rules.toml, what a stopped command left."""

import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from mx_jax import checkpoint
from mx_jax.cli import command_parser
from mx_jax.commands import resuming
from mx_jax.commands.output import partial_folder
from mx_jax.formats import MXFP4
from mx_jax.generate.tokenizer import Tokenizer, tokenizer_of_folder, tokenizer_of_gguf
from tests.checkpoint.gguf_bytes import BOOL, I32, STRING, U32, array, gguf, text
from tests.checkpoint.sample import Sample, quietly
from tests.checkpoint.stored import draw

# The digest of a file that is resumed from has its path, which is another each time.
_SOURCE = "@source@"
_TOKENS = ["a", "b", "ab", "<s>", "</s>"]
_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
_RULES = """
[[rule]]
pattern = "skipped.*"
skip = true
[[rule]]
pattern = ".*mlp"
format = "mxfp4"
scale_rule = "even"
axis = -1
[[rule]]
pattern = "wide"
recipe = "mxfp8"
[[rule]]
pattern = ".*"
format = "nvfp4"
scales = "mse"
"""


def word_samples() -> list[Sample]:
    """One of each; of tokenizers only where the libraries are that read them (extra `generate`)."""
    needs = [importlib.util.find_spec(name) for name in ("tokenizers", "jinja2")]
    tokenizers = [
        Sample("tokenizer folder", _tokenizer_folder(), read_tokenizer),
        Sample("tokenizer gguf", {"model.gguf": _tokenizer_gguf()}, read_tokenizer_gguf),
    ]
    return [
        *(tokenizers if all(needs) else []),
        Sample("rules", {"rules.toml": _RULES.encode()}, judge_by_rules),
        Sample("resume", _stopped(), resume),
    ]


def _use(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("abba")
    tokenizer.decode([*tokens, 0, 10**6])
    if tokenizer.template:
        tokenizer.chat("ab")


def read_tokenizer(path: Path) -> None:
    """A tokenizer of a model's folder."""
    _use(tokenizer_of_folder(path))


def read_tokenizer_gguf(path: Path) -> None:
    """The same of a GGUF file's fields."""
    file = path / "model.gguf"
    _use(tokenizer_of_gguf(checkpoint.read(file).metadata, str(file)))


def judge_by_rules(path: Path) -> None:
    """What rules say of tensors that are always the same."""
    arrays = {"mlp.weight": jnp.ones((4, 64)), "wide.kernel": jnp.ones((64, 4))}
    arrays |= {"skipped.weight": jnp.ones((2, 32)), "norm": jnp.ones(3)}
    model, rules = path / "model.safetensors", path / "rules.toml"
    checkpoint.save(model, arrays)
    quietly("quantize", str(model), str(path / "out"), "--rules", str(rules), "--dry-run")


def _convert(path: Path) -> list[str]:
    names = str(path / "model.safetensors"), str(path / "out")
    return ["convert", *names, "--to", "modelopt-mxfp4", "--max-shard-size", "200B"]


def resume(path: Path) -> None:
    """A command taken up again, from files that may not be its own."""
    words = [*_convert(path), "--resume"]
    fresh = command_parser().parse_args([*words[:2], str(path / "fresh"), *words[3:]])
    (path / "fresh").mkdir()
    resuming.begin(fresh, path / "fresh")
    source = json.loads((path / "fresh" / resuming.RECORD).read_text())["in"]
    record = partial_folder(path / "out") / resuming.RECORD
    record.write_bytes(record.read_bytes().replace(_SOURCE.encode(), source.encode()))
    quietly(*words)
    dict(checkpoint.read(path / "out"))


def _stopped() -> dict[str, bytes]:
    rng = np.random.default_rng(3)
    weights = {f"{name}.weight": draw(MXFP4, (4, 64), rng) for name in "abc"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        checkpoint.write(path / "model.safetensors", weights, layout="mxfp4-pack-quantized")
        quietly(*_convert(path))
        options = command_parser().parse_args(_convert(path))
        made = (path / "out").rename(partial_folder(path / "out"))
        resuming.begin(options, made)
        record = made / resuming.RECORD
        said = json.loads(record.read_text()) | {"in": _SOURCE}
        record.write_text(json.dumps(said))
        kept = [path / "model.safetensors", record, *sorted(made.glob("*-00001-*"))]
        return {str(file.relative_to(path)): file.read_bytes() for file in kept}


def _tokenizer_folder() -> dict[str, bytes]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [
            {"id": 3 + i, "content": token, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for i, token in enumerate(_TOKENS[3:])
        ],
        "pre_tokenizer": byte_level | {"use_regex": True},
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(_TOKENS)},
            "merges": ["a b"],
        },
    }
    stated = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": _TEMPLATE}
    files = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": stated,
        "generation_config.json": {"eos_token_id": [4]},
        "config.json": {"eos_token_id": 4},
    }
    return {name: json.dumps(said).encode() for name, said in files.items()}


def _tokenizer_gguf() -> bytes:
    def number(value: int) -> tuple[int, bytes]:
        return U32, value.to_bytes(4, "little")

    begin = "tokenizer.ggml."
    types = [one.to_bytes(4, "little") for one in (1, 1, 1, 3, 3)]
    pairs = {
        f"{begin}model": (STRING, text("gpt2")),
        f"{begin}pre": (STRING, text("smollm")),
        f"{begin}tokens": array(STRING, [text(token) for token in _TOKENS]),
        f"{begin}token_type": array(I32, types),
        f"{begin}merges": array(STRING, [text("a b")]),
        f"{begin}bos_token_id": number(3),
        f"{begin}eos_token_id": number(4),
        f"{begin}add_bos_token": (BOOL, b"\1"),
        "tokenizer.chat_template": (STRING, text(_TEMPLATE)),
    }
    return gguf({}, pairs)
