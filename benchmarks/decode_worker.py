"""One case of `benchmarks.decode` here: a model in its formats.

Reads a number a line, decodes that many tokens from the same place, some in each dispatch, and
answers with the seconds that they took; `parts` is answered with where a step spends its time.
"""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import jax
import numpy as np

from mx_jax.generate.command import settle, time_of_parts
from mx_jax.generate.load import load


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--stride", type=int, required=True)
    for name in ("weights", "activations", "cache"):
        parser.add_argument(f"--{name}")
    options = parser.parse_args()
    generator, _ = load(
        options.model,
        weights=options.weights,
        activations=options.activations,
        cache=options.cache,
    )
    generator = dataclasses.replace(generator, stride=options.stride)
    key, first = jax.random.key(0), np.ones((1, 1), np.int32)
    caches = generator.caches(options.context)
    token, caches = generator.steps(first, caches, 0, key)
    settle()
    used = sum(leaf.nbytes for leaf in jax.tree.leaves(generator.params))
    print(json.dumps({"bytes": used}), flush=True)
    for line in sys.stdin:
        if line.strip() == "parts":
            print(json.dumps(time_of_parts(generator, options.context)), flush=True)
            continue
        token = first
        wall, cpu = time.perf_counter(), time.process_time()
        for position in range(0, int(line), generator.stride):
            tokens, caches = generator.steps(token, caches, position, key)
            token = tokens[:, -1:]
            token.block_until_ready()
        spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        print(json.dumps(spent), flush=True)


if __name__ == "__main__":
    main()
