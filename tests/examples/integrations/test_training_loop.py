"""optax and orbax around a quantized model; grain and clu too, where they are installed."""

from typing import Any

import jax
import numpy as np
import pytest

from mx_jax.testing.compare import assert_bitwise_equal


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_it_learns_and_is_restored(integration: Any):
    example = integration("training_loop")
    losses, report, kept, restored = example.main()
    assert losses[0] > 1.0 and np.mean(losses[-5:]) < 0.6 * np.mean(losses[:5]), losses
    assert report.quantized == {"Model/hidden": ("output", "grad_weight")}
    assert report.plain == ("Model/head",)
    # What orbax gives back to a float32 model of the same shape is what was saved.
    assert jax.tree.structure(restored) == jax.tree.structure(kept)
    for left, right in zip(jax.tree.leaves(restored), jax.tree.leaves(kept), strict=True):
        assert_bitwise_equal(left, right)
    assert kept["step"] == 20
    assert example.mean([1.0, 2.0]) == 1.5
