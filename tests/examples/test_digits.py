import re

import pytest

pytest.importorskip("optax")
pytest.importorskip("sklearn")
pytest.importorskip("tqdm")


@pytest.mark.slow
def test_every_recipe_learns_and_is_printed(example, capsys):
    example("digits_mlp").main(steps=40)
    accuracies = dict(re.findall(r"(\w+): ([\d.]+)%", capsys.readouterr().out))
    assert list(accuracies) == ["float32", "MXFP8", "MXFP4"]
    assert all(float(percent) > 85 for percent in accuracies.values())
