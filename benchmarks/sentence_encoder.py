"""MiniLM of `examples/sentence_embeddings.py`, for benchmarks: it is a script, not installed."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from minilm.embedding import Batch as Batch
from minilm.embedding import Embedder as Embedder
from minilm.embedding import agreement as agreement
from minilm.embedding import batches as batches
from minilm.formats import Choice as Choice
from minilm.formats import converted as converted
from minilm.formats import kernel_bytes as kernel_bytes
from minilm.formats import moments as moments
from minilm.formats import quantized as quantized
from minilm.formats import stored as stored
from minilm.formats import table_bytes as table_bytes
from minilm.model import Encoder as Encoder
from minilm.sentences import standard_library as standard_library
from minilm.weights import ModelError as ModelError
from minilm.weights import find_folder as find_folder
from minilm.weights import load as load
from minilm.weights import tokenizer as tokenizer
