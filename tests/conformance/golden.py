"""The golden files, and what each of their arrays says: parsed from names, as MANIFEST.json has it.

A `Case` is one quantized tensor: its input, how to quantize it and the arrays that must come out.
Tables (casts, decoding, dequantizing, stochastic rounding) have no scale of their own and are read
by name in `test_data.py`.
"""

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import mx_jax
from mx_jax.formats import (
    INT8_FULL,
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    MXINT8,
    NVFP4,
    NVFP4_ONE_LEVEL,
    BlockFormat,
)
from mx_jax.testing.compare import assert_bitwise_equal

DATA = Path(__file__).parent / "data"
MANIFEST: dict[str, Any] = json.loads((DATA / "MANIFEST.json").read_text())
FILES = tuple(MANIFEST["files"])

FORMATS: dict[str, BlockFormat] = {
    "fp4_e2m1": MXFP4,
    "fp6_e2m3": MXFP6_E2M3,
    "fp6_e3m2": MXFP6_E3M2,
    "fp8_e4m3": MXFP8_E4M3,
    "fp8_e5m2": MXFP8_E5M2,
    "int8": MXINT8,
}
_FORMAT = "(?P<format>" + "|".join(FORMATS) + ")"
_ROUNDINGS = {"rna": "away", "rtz": "toward_zero", "rne_full": "nearest"}

# How each file names the scales of a case; codes and values replace "scale" by "codes" and "deq".
_NAMES = {
    "blocks": re.compile(rf"scale_{_FORMAT}_(?P<rule>[a-z]+)_(?P<input>(?P<layout>[LAMR]\d+))"),
    "edges": re.compile(rf"scale_{_FORMAT}_(?P<rule>[a-z]+)_(?P<input>b(?P<block>\d+))"),
    "rounding": re.compile(
        rf"scale_{_FORMAT}_(?P<rule>floor)_(?P<rounding>rna|rtz|rne_full)"
        r"_(?P<input>b(?P<block>\d+))"
    ),
    "nvfp4": re.compile(r"scale_(?P<input>(?:f32|bf16)_[a-z0-9]+)_(?P<level>l1|amax|arb|two)"),
}


@functools.cache
def arrays(file: str) -> dict[str, np.ndarray]:
    """Every array of a golden file."""
    with np.load(DATA / file) as archive:
        return dict(archive)


def from_bits(patterns: np.ndarray) -> np.ndarray:
    """float32 or bfloat16 values of stored patterns."""
    return patterns.view(np.float32 if patterns.dtype == np.uint32 else ml_dtypes.bfloat16)


@dataclasses.dataclass(frozen=True)
class Case:
    """One tensor quantized one way.

    Attributes:
      file: golden file of the outputs.
      name: name of the scales without "scale_".
      source: (file, array) of the input.
      options: what `mx_jax.quantize` takes besides the tensor.
      tensor_scale_name: name of the tensor scale to pass, or None.
      outputs: name of each array to reproduce, by what it is: scales, codes, values, tensor_scale.
    """

    file: str
    name: str
    source: tuple[str, str]
    options: dict[str, Any]
    tensor_scale_name: str | None
    outputs: dict[str, str]

    def quantize(self, x: jax.Array) -> mx_jax.MXArray:
        """Quantize the input the case's way, through the public function."""
        name = self.tensor_scale_name
        tensor_scale = (
            None if name is None else jnp.asarray(arrays(self.file)[name].view(np.float32))
        )
        return mx_jax.quantize(x, tensor_scale=tensor_scale, **self.options)

    def check(self, what: str, actual: Any) -> None:
        """Compare one output; any NaN is as good as another (MANIFEST: compare with isnan)."""
        expected = arrays(self.file)[self.outputs[what]]
        if what in ("values", "tensor_scale"):
            expected = expected.view(np.float32)
        label = f"{self.file}: {self.outputs[what]}"
        assert_bitwise_equal(
            np.asarray(actual).reshape(expected.shape), expected, what=label, any_nan=True
        )


@functools.cache
def cases() -> tuple[Case, ...]:
    """Every case of every file, in the files' order."""
    result = []
    for file in FILES:
        kind = file.partition("_")[0].removesuffix(".npz")
        for name in arrays(file):
            match = _NAMES[kind].fullmatch(name) if kind in _NAMES else None
            if match is not None:
                result.append(_case(file, name.removeprefix("scale_"), match.groupdict()))
    return tuple(result)


def _case(file: str, name: str, parts: dict[str, str]) -> Case:
    outputs = {"scales": f"scale_{name}", "codes": f"codes_{name}"}
    tensor_scale = None
    if "level" in parts:
        source = file, f"in_{parts['input']}"
        options: dict[str, Any] = {"format": NVFP4_ONE_LEVEL if parts["level"] == "l1" else NVFP4}
        if parts["level"] in ("arb", "two"):
            tensor_scale = f"pts_{name}"
        elif parts["level"] == "amax":
            outputs["tensor_scale"] = f"pts_{name}"
    else:
        format = FORMATS[parts["format"]]
        layout = MANIFEST["layouts"].get(parts.get("layout"), {"axis": -1})
        options = {
            "format": format,
            "axis": layout["axis"],
            "block_size": layout["block"] if "block" in layout else int(parts["block"]),
            "scale_rule": parts["rule"],
        }
        if "rounding" in parts:
            options["rounding"] = _ROUNDINGS[parts["rounding"]]
            if parts["rounding"] == "rne_full":
                options["format"] = dataclasses.replace(format, element=INT8_FULL)
        source = file, f"in_{parts['input']}"
        if "layout" not in parts:
            source = file.replace("rounding", "edges"), f"in_{parts['format']}_{parts['input']}"
    if f"deq_{name}" in arrays(file):
        outputs["values"] = f"deq_{name}"
    return Case(file, name, source, options, tensor_scale, outputs)


@functools.cache
def sources() -> dict[tuple[str, str], tuple[Case, ...]]:
    """Cases by the input that they share."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases():
        groups.setdefault(case.source, []).append(case)
    return {source: tuple(group) for source, group in groups.items()}


def load(source: tuple[str, str]) -> jax.Array:
    """An input tensor."""
    file, name = source
    return jnp.asarray(from_bits(arrays(file)[name]))


def reproduce(cases: tuple[Case, ...], x: jax.Array) -> dict[str, dict[str, jax.Array]]:
    """Quantize one input all its cases' ways: each case's outputs, by its name.

    Cases of one format are dequantized together, stacked along a new first axis: blocks are counted
    from the end, so the stack is as good an MXArray as its layers.
    """
    quantized = {case.name: case.quantize(x) for case in cases}
    results = {name: {"scales": mx.scales, "codes": mx.codes} for name, mx in quantized.items()}
    for name, mx in quantized.items():
        if mx.tensor_scale is not None:
            results[name]["tensor_scale"] = mx.tensor_scale
    groups: dict[tuple[BlockFormat, bool], list[str]] = {}
    for case in cases:
        if "values" in case.outputs:
            groups.setdefault((case.options["format"], case.tensor_scale_name is None), []).append(
                case.name
            )
    for names in groups.values():
        layers = [quantized[name] for name in names]
        stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
        results |= {
            name: results[name] | {"values": values}
            for name, values in zip(names, stack.dequantize(jnp.float32), strict=True)
        }
    return results


def check(cases: tuple[Case, ...], results: dict[str, dict[str, jax.Array]], rows: int) -> int:
    """Compare every output of every case, padding rows dropped; returns how many were compared."""
    compared = 0
    for case in cases:
        for what in case.outputs:
            actual = results[case.name][what]
            case.check(what, actual if what == "tensor_scale" else actual[:rows])
            compared += 1
    return compared
