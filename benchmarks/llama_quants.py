"""Writes what llama.cpp makes of a GGUF file's float32 values: one file for each of its quants.

    python benchmarks/llama_quants.py smollm2.gguf folder/

A program alone, for an environment that has llama.cpp (`pip install cyllama gguf`);
`benchmarks.calibration --peers folder/*.gguf` measures what it writes.
"""

import argparse
import sys
from pathlib import Path

import gguf
from gguf.quants import dequantize

# By llama.cpp's names, the numbers of its `llama_ftype`.
QUANTS = {"Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18, "IQ4_XS": 30}


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


def main() -> int:
    """Run the program; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("out", type=Path, help="a folder")
    parser.add_argument("--quants", nargs="+", choices=QUANTS, default=list(QUANTS))
    parser.add_argument("--pure", action="store_true", help="every matrix alike, the embedding too")
    options = parser.parse_args()
    from cyllama.llama.llama_cpp import LlamaModelQuantizeParams, model_quantize

    options.out.mkdir(exist_ok=True)
    exact = options.out / "F32.gguf"
    if not exact.exists():
        write_float32(options.model, exact)
    for name in options.quants:
        params = LlamaModelQuantizeParams()
        params.ftype, params.nthread, params.pure = QUANTS[name], 1, options.pure
        out = options.out / f"{name}.gguf"
        model_quantize(str(exact), str(out), params)
        print(f"{name}: {out.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
