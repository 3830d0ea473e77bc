"""Writes what llama.cpp makes of a GGUF file's float32 values: one file for each of its quants.

    python benchmarks/llama_quants.py smollm2.gguf folder/
    python benchmarks/llama_quants.py smollm2.gguf folder/ --moments moments.safetensors

A program alone, for an environment that has llama.cpp (`pip install llama-cpp-python gguf
safetensors`); `benchmarks.calibration --peers folder/*.gguf` measures what it writes. The
importance matrix is the diagonal of the moments that `examples/llama_moments.py` writes: the mean
squares of what each matrix is multiplied with are what llama.cpp's own program collects.
"""

import argparse
import ctypes
import sys
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from gguf.quants import dequantize

# By llama.cpp's names, the numbers of its `llama_ftype`.
QUANTS = {
    "Q4_0": 2,
    "Q8_0": 7,
    "Q4_K_M": 15,
    "Q5_K_M": 17,
    "Q6_K": 18,
    "IQ4_NL": 25,
    "IQ4_XS": 30,
}


def write_float32(source: Path, out: Path) -> None:
    """The same model, with the values that its tensors stand for."""
    reader = gguf.GGUFReader(source)
    field = reader.fields["general.architecture"]
    writer = gguf.GGUFWriter(out, field.contents())
    written = {"general.architecture", "general.file_type"}
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in written:
            continue
        kind, *inner = field.types
        writer.add_key_value(name, field.contents(), kind, inner[-1] if inner else None)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype("float32")
        writer.add_tensor(tensor.name, values.reshape(tensor.shape[::-1]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def importance(path: Path) -> ctypes.Array[llama_cpp.llama_model_imatrix_data]:
    """Squares of the inputs of each matrix; llama.cpp reads up to one without a name."""
    from safetensors.numpy import load_file

    squares = {
        name: np.ascontiguousarray(np.diag(moment), np.float32)
        for name, moment in load_file(path).items()
    }
    entries = (llama_cpp.llama_model_imatrix_data * (len(squares) + 1))()
    for entry, (name, each) in zip(entries, squares.items(), strict=False):
        entry.name, entry.size = name.encode(), each.size
        entry.data = each.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    entries.keep = list(squares.values())  # type: ignore[attr-defined]
    return entries


def main() -> int:
    """Run the program; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("out", type=Path, help="a folder")
    parser.add_argument("--quants", nargs="+", choices=QUANTS, default=list(QUANTS))
    parser.add_argument("--moments", type=Path, help="makes an importance matrix")
    parser.add_argument("--pure", action="store_true", help="table and head as the rest")
    options = parser.parse_args()
    options.out.mkdir(exist_ok=True)
    exact = options.out / "F32.gguf"
    if not exact.exists():
        write_float32(options.model, exact)
    for name in options.quants:
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.nthread, params.pure = QUANTS[name], 1, options.pure
        if options.moments is not None:
            params.imatrix = importance(options.moments)
        words = [name, *["pure"] * options.pure, *["imatrix"] * (options.moments is not None)]
        out = options.out / f"{' '.join(words)}.gguf"
        if status := llama_cpp.llama_model_quantize(str(exact).encode(), str(out).encode(), params):
            raise SystemExit(f"llama_quants: {out}: status {status}")
        print(f"{out.stem}: {out.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
