"""Shared cases and comparisons, installed so that tests, benchmarks and tuning agree; machines."""

from mx_jax.testing.machine import target as target
