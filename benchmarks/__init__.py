"""Measurements: `python -m benchmarks.quantize`, `.sqnr`, `.train_step`; each has `--help`."""
