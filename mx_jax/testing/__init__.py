"""Shared cases and comparisons, installed so that tests, benchmarks and tuning agree."""
