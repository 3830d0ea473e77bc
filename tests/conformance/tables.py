"""Names of the golden arrays that are tables: read by name, not parsed into cases."""

from tests.conformance.golden import FORMATS

ELEMENTS = tuple(FORMATS)
NOT_SATURATING = ("fp8_e4m3", "fp8_e5m2")
RANDOM_BITS = (8, 16)

DECODE = {element: f"decode_{element}_f32" for element in ELEMENTS}
CAST = {element: f"cast_bf16_{element}_rne_sat" for element in ELEMENTS}
CAST_NOT_SATURATING = {element: f"cast_bf16_{element}_rne_nosat" for element in NOT_SATURATING}
DEQUANTIZE = {
    (element, dtype): f"dequant_{element}_{dtype}"
    for element in ELEMENTS
    for dtype in ("f32", "bf16")
}
STOCHASTIC = {
    (element, bits): (f"in_{element}", f"rand{bits}_{element}", f"codes{bits}_{element}")
    for element in ELEMENTS
    for bits in RANDOM_BITS
}
SPECIAL = tuple(f"special_{part}_l1" for part in ("scale", "codes", "deq"))

INPUTS = {
    *(("stochastic.npz", name) for names in STOCHASTIC.values() for name in names[:2]),
    ("nvfp4.npz", "special_in_f32"),
}
ARRAYS = {
    *INPUTS,
    ("tables.npz", "decode_e8m0_f32"),
    *(("tables.npz", name) for name in (*DECODE.values(), *CAST.values())),
    *(("tables.npz", name) for name in CAST_NOT_SATURATING.values()),
    *(("dequant.npz", name) for name in DEQUANTIZE.values()),
    *(("stochastic.npz", names[2]) for names in STOCHASTIC.values()),
    *(("nvfp4.npz", name) for name in SPECIAL),
}
