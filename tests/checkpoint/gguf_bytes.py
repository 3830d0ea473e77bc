"""GGUF files put together by hand, from the format's description and nothing of mx_jax."""

import dataclasses
import struct
from collections.abc import Mapping, Sequence

U8, I32, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 5, 4, 6, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    stored = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(stored)) + stored


def array(kind: int, items: Sequence[bytes]) -> tuple[int, bytes]:
    return ARRAY, struct.pack("<IQ", kind, len(items)) + b"".join(items)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """What a file says of a tensor, and its bytes; `offset` in place of the right one."""

    type: int
    dims: tuple[int, ...]
    stored: bytes = b""
    offset: int | None = None


def gguf(
    tensors: Mapping[str, Tensor],
    pairs: Mapping[str, tuple[int, bytes]] | None = None,
    *,
    version: int = 3,
    count: int | None = None,
    count_pairs: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A file; counts in place of the right ones."""
    pairs = {} if pairs is None else pairs
    counts = (
        len(tensors) if count is None else count,
        len(pairs) if count_pairs is None else count_pairs,
    )
    header = b"GGUF" + struct.pack("<IQQ", version, *counts)
    for key, (kind, value) in pairs.items():
        header += text(key) + struct.pack("<I", kind) + value
    data = b""
    for name, tensor in tensors.items():
        offset = len(data) if tensor.offset is None else tensor.offset
        header += text(name) + struct.pack("<I", len(tensor.dims))
        header += struct.pack(f"<{len(tensor.dims)}Q", *tensor.dims)
        header += struct.pack("<IQ", tensor.type, offset)
        data += tensor.stored + b"\0" * (-len(tensor.stored) % alignment)
    return header + b"\0" * (-len(header) % alignment) + data
