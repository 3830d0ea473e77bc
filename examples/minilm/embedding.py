"""Many sentences at once: batches of as many tokens, and programs compiled once for each length."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np

# Sentences are padded to one of these, so that XLA compiles few programs.
LENGTHS = (16, 32, 64, 128, 256)
# Tokens of a batch, padding included: products of float32 with packed weights are made for up to
# as many rows on a CPU.
TOKENS = 512


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sentences of about one length.

    Attributes:
      where: which sentences of the whole they are; shorter than the batch if that is filled up.
      tokens: `[batch, time]`, int32.
      mask: `[batch, time]`, False where a sentence is padded.
    """

    where: np.ndarray
    tokens: np.ndarray
    mask: np.ndarray


def batches(sentences: Sequence[Sequence[int]], count: int = TOKENS) -> Iterator[Batch]:
    """All sentences, the shortest first, about `count` tokens at a time.

    The last batch of each length is filled up with its last sentence.
    """
    order = np.argsort([len(one) for one in sentences], kind="stable")
    lengths = np.array([_padded(len(sentences[index])) for index in order])
    for length in np.unique(lengths):
        alike, size = order[lengths == length], max(count // int(length), 1)
        for first in range(0, len(alike), size):
            yield _batch(sentences, alike[first : first + size], size, int(length))


def _padded(length: int) -> int:
    fitting = (one for one in LENGTHS if one >= length)
    if (width := next(fitting, None)) is None:
        raise ValueError(f"batches: a sentence has at most {LENGTHS[-1]} tokens, got {length}")
    return width


def _batch(sentences: Sequence[Sequence[int]], where: np.ndarray, size: int, time: int) -> Batch:
    tokens, mask = np.zeros((size, time), np.int32), np.zeros((size, time), bool)
    for row in range(size):
        sentence = sentences[where[min(row, len(where) - 1)]]
        tokens[row, : len(sentence)] = sentence
        mask[row, : len(sentence)] = True
    return Batch(where, tokens, mask)


@dataclasses.dataclass
class Embedder:
    """A model with its parameters, compiled.

    Attributes:
      model: from tokens and mask to vectors; converted or not.
      variables: its own, quantized or not.
    """

    model: nn.Module
    variables: Any

    def __post_init__(self):
        self.run: Callable[..., Any] = jax.jit(self.model.apply)

    def embed(
        self,
        sentences: Sequence[Sequence[int]],
        done: Callable[[int], None] = lambda count: None,
    ) -> np.ndarray:
        """Unit vectors `[sentences, width]` of sentences given as tokens.

        Args:
          sentences: at least one, each of 1 to 256 tokens.
          done: hears after each batch how many sentences it had.
        """
        embeddings: np.ndarray | None = None
        for batch in batches(sentences):
            vectors = np.asarray(self.run(self.variables, batch.tokens, batch.mask))
            if embeddings is None:
                embeddings = np.zeros((len(sentences), vectors.shape[1]), np.float32)
            embeddings[batch.where] = vectors[: len(batch.where)]
            done(len(batch.where))
        if embeddings is None:
            raise ValueError("embed: needs at least one sentence, got none")
        return embeddings


def neighbors(vectors: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """For each unit vector the nearest others, the nearest first.

    Returns:
      Which they are and their cosine similarities, both `[vectors, count]`.
    """
    similar = vectors @ vectors.T
    np.fill_diagonal(similar, -np.inf)
    nearest = np.argsort(-similar, axis=1, kind="stable")[:, :count]
    return nearest, np.take_along_axis(similar, nearest, 1)


def agreement(vectors: np.ndarray, exact: np.ndarray) -> dict[str, float]:
    """How near vectors are to the exact ones, and whether a search finds the same sentences.

    Returns:
      Mean and smallest cosine; the share of sentences whose nearest other one is the same; the mean
      share of the ten nearest that are the same.
    """
    cosine = np.sum(vectors * exact, axis=1, dtype=np.float64)
    count = min(10, len(exact) - 1)
    near, exactly_near = (neighbors(each, count)[0] for each in (vectors, exact))
    shared = [len(set(a) & set(b)) / count for a, b in zip(near, exactly_near, strict=True)]
    return {
        "cosine": float(cosine.mean()),
        "smallest": float(cosine.min()),
        "nearest": float((near[:, 0] == exactly_near[:, 0]).mean()),
        "ten": float(np.mean(shared)),
    }
