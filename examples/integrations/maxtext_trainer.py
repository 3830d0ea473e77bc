"""A recipe in MaxText's own trainer: `python maxtext_trainer.py`.

Needs MaxText (0.2.5). Configuration, model, data, optimizer, shardings and loop are MaxText's, as
its command starts them; the recipe is chosen by name before that.
"""

import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")

from maxtext.trainers.pre_train import train
from maxtext.utils import train_utils
from maxtext.utils.globals import MAXTEXT_CONFIGS_DIR
from maxtext_quantization import use_recipe
from shared import Report, report, run_command, show

# A Llama of two blocks of width 64, on MaxText's own synthetic data.
SETTINGS = """
    run_name=mx_jax steps={steps} dataset_type=synthetic enable_checkpointing=False
    base_emb_dim=64 base_num_query_heads=2 base_num_kv_heads=2 head_dim=32 base_mlp_dim=128
    base_num_decoder_layers=2 vocab_size=64 max_target_length=32 per_device_batch_size=4
    dtype=float32 attention=dot_product learning_rate=1e-2 warmup_steps_fraction=0.1
    enable_goodput_recording=False monitor_goodput=False enable_checkpoint_cloud_logger=False
    skip_jax_distributed_system=True log_config=False
"""


@dataclasses.dataclass
class Recorded:
    """A jitted step that remembers what was compiled of it."""

    step: Any
    texts: list[str]

    def __call__(self, *args: Any) -> Any:
        return self.step(*args)

    def lower(self, *args: Any) -> Any:
        lowered = self.step.lower(*args)
        self.texts.append(lowered.compile().as_text())
        return lowered


def main(
    steps: int = 10, recipe: str = "mxfp8", settings: tuple[str, ...] = ()
) -> tuple[list[float], Report]:
    """Trains by MaxText's `main`; losses of its own metrics, and what its program holds."""
    texts: list[str] = []
    jit_train_step = train_utils.jit_train_step
    use_recipe(recipe)

    def recorded(*args: Any, **options: Any) -> Recorded:
        return Recorded(jit_train_step(*args, **options), texts)

    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        places = f"base_output_directory={folder} metrics_file={metrics}"
        chosen = f"{SETTINGS.format(steps=steps)} {places}".split()
        config = str(Path(MAXTEXT_CONFIGS_DIR) / "base.yml")
        with mock.patch.object(train_utils, "jit_train_step", recorded):
            train.main([sys.argv[0], config, *chosen, *settings])
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [row["learning/loss"] for row in rows if "learning/loss" in row]
    layers = report(texts[0])
    show([losses, layers])
    return losses, layers


if __name__ == "__main__":
    run_command(main, __doc__)
