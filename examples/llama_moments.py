"""Writes the second moments of the inputs of a Llama's matrices, from texts, for GPTQ.

    python examples/llama_moments.py smollm2 moments.safetensors
    python examples/llama_moments.py model/ moments.safetensors --texts articles.txt
    python -m mx_jax quantize model/ small/ --format mxfp4 --keep '' --moments moments.safetensors

  which loses least in four bits: of the same model, rotated, that it writes first
    python examples/llama_moments.py model/ moments.safetensors --rotate rotated/
    python -m mx_jax quantize rotated/ small/ --format nvfp4 --keep '' --moments moments.safetensors

Texts should be of the kind that the model is to be good at; without them it reads Python's own
manual. The file has a float32 matrix of k x k for every matrix with k inputs, by its name.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from generate.config import LlamaConfig
from generate.load import WHOLE, Source, find_model, open_model, params_of
from generate.model import Llama
from rich.console import Console
from rich.progress import track
from safetensors.numpy import save_file

from mx_jax import calibrate, checkpoint, commands, recipes

# More texts bring little: tokens that are read at most, and the length of sequences.
TOKENS, LENGTH = 20480, 512


def manual() -> str:
    """Python's own manual of its language, which every installation has; in order of its topics."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def model_moments(params: object, config: LlamaConfig, tokens: Sequence[int]) -> calibrate.Moments:
    """`calibrate.moments` of a model, its head's among them, by paths of its parameters."""
    length = min(LENGTH, config.context)
    count = min(len(tokens), TOKENS) // length
    if not count:
        raise ValueError(f"needs a text of {length} tokens at least, got {len(tokens)}")
    sequences = np.array(tokens[: count * length], np.int32).reshape(count, 1, length)
    read = track(sequences, "calibrate", console=Console(stderr=True), transient=True)
    model = Llama(config, recipes.high_precision())
    return calibrate.moments(model, read, variables={"params": params})


def tensor_moments(source: Source, texts: Sequence[str]) -> dict[str, np.ndarray]:
    """Moments by the names of a checkpoint's tensors; the model joins some of their products."""
    config, name = source.config, source.names.of
    params = params_of(source.weights, config, source.names)
    moments = model_moments(params, config, source.tokenizer().encode("\n".join(texts)))
    by_name = {
        name(field, index): moments[f"layers_{index}/{path}"]
        for index in range(config.layers)
        for field, path in WHOLE.items()
    }
    head = "embedding" if config.tied else "head"
    by_name[name(head)] = moments[head]
    return {name: np.asarray(moment, np.float32) for name, moment in by_name.items()}


def write_rotated(source: Source, folder: Path) -> None:
    """The same model by `calibrate.rotate`, in float; its head is a matrix of its own."""
    if commands.main(["dequantize", str(source.weights.path), str(folder)]):
        raise ValueError(f"{folder} was not written")
    (file,) = folder.glob("*.safetensors")
    tensors = dict(checkpoint.read(file))
    channels = calibrate.llama(tensors, source.config.head_width)
    rotated = calibrate.rotate(tensors, channels)
    save_file({name: np.asarray(w) for name, w in rotated.items()}, file)
    if (config := folder / "config.json").exists():
        fields = json.loads(config.read_text()) | {"tie_word_embeddings": False}
        config.write_text(json.dumps(fields, indent=2))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a GGUF file, a folder, or smollm2")
    parser.add_argument("out", type=Path, help="the safetensors file to write")
    parser.add_argument("--texts", metavar="FILE", nargs="+", type=Path, default=())
    parser.add_argument("--rotate", metavar="FOLDER", type=Path, help="write the model rotated")
    options = parser.parse_args(argv)
    try:
        source = open_model(find_model(options.model))
        if options.rotate:
            write_rotated(source, options.rotate)
            source = open_model(options.rotate)
        texts = [path.read_text(encoding="utf-8") for path in options.texts]
        moments = tensor_moments(source, texts or [manual()])
        save_file(moments, options.out)
    except (ValueError, OSError, ImportError) as error:
        print(f"llama_moments: {error}", file=sys.stderr)
        return 2
    print(
        f"{options.out}: of {len(moments)} matrices; next, with a format of your choice:\n"
        f"python -m mx_jax quantize {source.weights.path} small/ --format mxfp4 --keep '' "
        f"--moments {options.out}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
