"""safetensors files put together and taken apart by hand: `struct`, JSON and nothing of mx_jax."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

# What lies in a file: the format's name of a dtype, the shape, the bytes.
Tensor = tuple[str, tuple[int, ...], bytes]


def tensor(dtype: str, shape: tuple[int, ...], stored: Any) -> Tensor:
    """One whose bytes are given as they are, or as numbers of bytes."""
    return dtype, shape, bytes(stored)


def floats(shape: tuple[int, ...], values: list[float]) -> Tensor:
    """float32, little-endian."""
    return "F32", shape, struct.pack(f"<{len(values)}f", *values)


def put(folder: Path, tensors: Mapping[str, Tensor], config: Any = None) -> Path:
    """A folder of a model: one file, and config.json if it says anything."""
    header, data = {}, b""
    for name, (dtype, shape, stored) in tensors.items():
        ends = [len(data), len(data) + len(stored)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": ends}
        data += stored
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def taken_apart(file: Path) -> dict[str, Tensor]:
    """The tensors of a file."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    header.pop("__metadata__", None)
    return {
        name: (said["dtype"], tuple(said["shape"]), data[slice(*said["data_offsets"])])
        for name, said in header.items()
    }


# E2M1 by its four bits: sign, two of the exponent, one of the mantissa.
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def nibbles(stored: bytes, shape: tuple[int, ...]) -> np.ndarray:
    """Values of FP4 codes, the even one of two in the low half of its byte."""
    halves = [E2M1[half] for byte in stored for half in (byte & 15, byte >> 4)]
    return np.array(halves, np.float32).reshape(shape)


# Some codes of E4M3, 2^(e - 7) (1 + m / 8), subnormals m 2^-9: bits and value.
E4M3 = {
    0x00: 0.0,
    0x01: 2.0**-9,
    0x07: 7 * 2.0**-9,
    0x08: 2.0**-6,
    0x30: 0.5,
    0x38: 1.0,
    0x39: 1.125,
    0x3C: 1.5,
    0x40: 2.0,
    0x7E: 448.0,
    0xB8: -1.0,
    0xC4: -3.0,
    0xFE: -448.0,
}
