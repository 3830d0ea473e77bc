"""Codes and values: bit-exact conversions, rounding, scales, packing and block shapes."""
