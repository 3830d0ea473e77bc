"""The numeric core, module by module, and the tests that are to find a change of it.

Quick tests come first: each mutant runs them in this order, up to the first that fails.
"""

from pathlib import Path

ROOT = Path(__file__).parents[2]


def path_of(module: str) -> Path:
    """A module's file."""
    return (ROOT / module.replace(".", "/")).with_suffix(".py")


def _jit(*names: str) -> tuple[str, ...]:
    """Golden arrays, of the published ones, through the caller's jit."""
    return tuple(f"tests/conformance/test_quantized.py::test_jit[{name}]" for name in names)


_FORMATS = (
    "tests/formats",
    *(
        f"tests/extending/test_element_format.py::{name}"
        for name in ("test_facts_that_make_no_format", "test_the_ends_of_what_float32_holds")
    ),
)
_TABLES = tuple(
    f"tests/conformance/test_tables.py::{name}[jit]"
    for name in ("test_cast", "test_cast_without_saturation", "test_decode", "test_decode_e8m0")
)
_EDGES = _jit("edges_f32-fp4_e2m1_b32", "nvfp4-f32_0")
_RULES = ("tests/reference/test_scale_rules.py",)
_FLOAT_SCALES = tuple(
    f"tests/quantize/test_float_scales.py::{name}"
    for name in (
        "test_nvfp4_of_zeros_and_of_what_is_not_finite",
        "test_nvfp4_of_tiny_and_huge_tensors",
        "test_four_over_six_takes_the_better_of_both",
        "test_float8_is_torchaos[float8]",
        "test_whole_blocks_cover_an_axis",
    )
)
_MALFORMED = (
    # Another test of the file needs the C++ library.
    *(
        f"tests/quantize/test_bad_input.py::{name}"
        for name in ("test_malformed", "test_refused_wherever_it_enters")
    ),
)
_RAGGED = (
    "tests/reference/test_ragged.py",
    *(
        f"tests/ragged/test_products.py::{name}"
        for name in (
            "test_layout",
            "test_group_sizes_beyond_the_rows_are_cut_off",
            "test_products_of_a_loop_over_groups[mxfp4, 4 x 8]",
            "test_saved_codes_are_quantized_anew",
        )
    ),
    "tests/ragged/test_ragged_dot.py::test_vmap",
)

_CLIPPING = (
    "tests/ops/test_clipping.py",
    "--deselect=tests/ops/test_clipping.py::test_ragged_rows_with_drawn_bits",
)

CORE: dict[str, tuple[str, ...]] = {
    "mx_jax.formats.block": _FORMATS,
    "mx_jax.formats.element": _FORMATS,
    "mx_jax.codecs.blocks": ("tests/codecs/test_blocks.py", *_MALFORMED),
    "mx_jax.codecs.element": (*_TABLES, "tests/codecs/test_element.py"),
    "mx_jax.codecs.explicit_axes": ("tests/codecs/test_explicit_axes.py",),
    "mx_jax.codecs.float32": (
        "tests/codecs/test_float32.py",
        "tests/quantize/test_mxarray.py::test_dequantize_gives_back_the_dtype",
    ),
    "mx_jax.codecs.indexing": (
        "tests/codecs/test_indexing.py",
        "tests/quantize/test_indexing.py",
    ),
    "mx_jax.codecs.packing": ("tests/codecs/test_packing.py",),
    "mx_jax.codecs.rounding": (
        "tests/codecs/test_rounding.py",
        _TABLES[0],
        "tests/conformance/test_tables.py::test_stochastic_rounding_with_given_bits[jit]",
        "tests/codecs/test_element.py::test_stochastic_with_given_bits",
        "tests/codecs/test_element.py::test_ties_and_their_neighbours",
    ),
    "mx_jax.codecs.scale": (
        "tests/codecs/test_scale.py",
        *_EDGES,
        "tests/quantize/test_tensor_scales.py",
        "tests/reference/test_matmul.py::test_a_tiny_tensor_scale_is_lifted",
        "tests/quantize/test_float_scales.py::test_nvfp4_of_tiny_and_huge_tensors",
    ),
    "mx_jax.reference.attention": ("tests/reference/test_matmul.py::test_attend",),
    "mx_jax.reference.hadamard": ("tests/reference/test_hadamard.py",),
    "mx_jax.reference.matmul": ("tests/reference/test_matmul.py",),
    "mx_jax.reference.quantize": (
        *_EDGES,
        *_FLOAT_SCALES,
        "tests/reference/test_eden.py::test_by_hand",
    ),
    "mx_jax.reference.ragged": _RAGGED,
    "mx_jax.reference.scale_rules": (
        *_RULES,
        *(
            f"tests/reference/test_eden.py::{name}"
            for name in (
                "test_by_hand",
                "test_a_partial_group_and_another_axis",
                "test_what_is_lost_stays_in_its_block",
                "test_square_blocks_share_with_those_beside_them",
                "test_headroom_never_clips",
                "test_scales_draw_a_number_for_each_block",
                "test_a_key_is_needed_and_fits",
            )
        ),
    ),
    "mx_jax.axes": ("tests/reference/test_axes.py",),
    "mx_jax.ops.clipping": _CLIPPING,
    "mx_jax.ops.kept": (
        "tests/recipes/test_quartet.py::test_what_is_kept",
        *_CLIPPING,
        *(
            f"tests/recipes/test_quartet.py::{name}"
            for name in (
                "test_by_hand",
                "test_square_blocks_are_turned_anew",
                "test_a_group_on_two_devices_is_refused",
            )
        ),
    ),
    "mx_jax.ops.keys": tuple(
        f"tests/ops/test_keys.py::{name}"
        for name in (
            "test_each_product_has_a_stream_of_its_own",
            "test_a_forward_product_that_draws_nothing_needs_no_key[matmul]",
            "test_a_gradient_that_draws_says_so",
            "test_a_recipe_that_draws_nothing_takes_a_key[matmul]",
            "test_what_is_no_key_is_refused_all_the_same",
        )
    ),
    "mx_jax.checkpoint.exact": (
        "tests/checkpoint/test_exact.py",
        "tests/checkpoint/test_qarray.py::test_powers_of_two_divide_exactly",
    ),
    "mx_jax.checkpoint.transcoding": (
        "tests/checkpoint/test_transcoding.py",
        "--deselect=tests/checkpoint/test_transcoding.py::test_from_gguf_to_others",
    ),
}
