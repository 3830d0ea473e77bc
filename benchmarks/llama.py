"""The language model of `examples/generate`, for benchmarks and tests: it is not installed."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from generate import decode as decode
from generate import model as model
from generate.config import GGUF as GGUF
from generate.config import HUB as HUB
from generate.config import LlamaConfig as LlamaConfig
from generate.config import config_from_gguf as config_from_gguf
from generate.decode import Generator as Generator
from generate.decode import advance as advance
from generate.load import DEFAULT as DEFAULT
from generate.load import find_model as find_model
from generate.load import formats_of as formats_of
from generate.load import load as load
from generate.load import open_model as open_model
from generate.load import params_of as params_of
from generate.load import quantized as quantized
from generate.load import recipe_for as recipe_for
from generate.model import Llama as Llama
from generate.tokenizer import Tokenizer as Tokenizer
from llama_moments import manual as manual
from llama_moments import model_moments as model_moments
