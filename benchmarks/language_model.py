"""The language model of `examples/train_lm.py`, for benchmarks: it is a script, not installed."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from lm import intervals as intervals
from lm.data import Corpus as Corpus
from lm.data import file_text as file_text
from lm.data import standard_library_text as standard_library_text
from lm.mesh import WEIGHTS as WEIGHTS
from lm.model import Block as Block
from lm.settings import STATES as STATES
from lm.settings import Precision as Precision
from lm.settings import Settings as Settings
from lm.settings import precision as precision
from lm.storage import Output as Output
from lm.storage import Run as Run
from lm.training import Interrupted as Interrupted
from lm.training import Trainer as Trainer
from lm.training import build_model as build_model
from lm.training import initial_state as initial_state
from lm.training import mean_loss as mean_loss
