"""The public names, pinned: one that appears or goes does so here first."""

import ast
import importlib
import pydoc
import re
from pathlib import Path

import pytest

import mx_jax

ROOT = Path(__file__).parents[2]
NAMESPACES = set("calibrate checkpoint convert formats inspect nn recipes sharding testing".split())
PUBLIC = {
    "mx_jax": """
        MXArray PackedMXArray cast cast_cotangent dequantize dot_general einsum
        expert_ragged_dot export_targets matmul only_backend pack_weights prefer_backends
        quantize quantize_both quantize_state ragged_dot save_products save_quantized
    """,
    "mx_jax.calibrate": """
        Channels Features Gptq Moments Pair SearchedScales UncalibratedWarning Way equalize gptq
        llama moments output_error rotate search_scales tell_input
    """,
    "mx_jax.checkpoint": """
        LAYOUTS Layout Plausibility Stored Weights from_packed from_wire
        load plausibility quantization_config read save to_wire transcode write
    """,
    "mx_jax.convert": """
        AutoFilter Conv Decision DotGeneral Layer RaggedDot Report Rule
        UnusedRuleWarning function gains linen nnx original report
        weights weights_report
    """,
    "mx_jax.formats": """
        BLOCK_FORMATS BlockFormat BlockSize E2M1 E2M3 E3M2 E4M3 E4M3FNUZ E4M3_SCALE E5M2
        E5M2FNUZ E8M0 ELEMENT_FORMATS ElementFormat F32 F32_DIVISOR FLOAT8_BLOCKWISE_2D_E4M3
        FLOAT8_BLOCKWISE_2D_E8M0 FLOAT8_BLOCKWISE_E4M3 FLOAT8_BLOCKWISE_E8M0
        FLOAT8_ROWWISE_E4M3 FLOAT8_ROWWISE_E5M2 FLOAT8_TENSORWISE_E4M3 FLOAT8_TENSORWISE_E5M2
        INT8 INT8_FULL INT8_ROWWISE INTEGER8 MXFP4 MXFP4_2D MXFP6_E2M3 MXFP6_E3M2 MXFP8_E4M3
        MXFP8_E5M2 MXINT8 MX_FORMATS NVFP4 NVFP4_2D NVFP4_ONE_LEVEL SCALE_FORMATS ScaleFormat WHOLE
        Whole any_format block_format check_block_size
    """,
    "mx_jax.recipes": """
        Hadamard MatmulSpec OperandSpec Recipe Residuals
        deepseek_v3 deepseek_v3_1 float8_rowwise float8_rowwise_with_gw_hp int8_rowwise
        float8_tensorwise from_name high_precision mxfp4 mxfp4_backward mxfp4_hadamard
        mxfp4_stochastic mxfp6 mxfp6_e2m3 mxfp8 mxfp8_hybrid mxint8 names nvfp4
        nvfp4_four_over_six nvfp4_pretraining nvfp4_unbiased operand qat
        weight_only
    """,
    "mx_jax.nn": """
        KVCache join_stored linen nnx split_stored
    """,
    "mx_jax.inspect": """
        Captured Explanation NonFiniteError Record Records
        STATISTICS Tag capture explain guard
        sqnr_db
    """,
    "mx_jax.sharding": """
        Dispatched Gather Specs device_put dispatch spec_for
    """,
    "mx_jax.testing": """
        target
    """,
}
PUBLIC = {module: set(names.split()) for module, names in PUBLIC.items()}
PUBLIC["mx_jax"] |= NAMESPACES


def public_names(source: str | ast.Module) -> set[str]:
    """Names that a module offers: `import X as X`, and what it defines without an underscore."""
    names = set()
    tree = ast.parse(source) if isinstance(source, str) else source
    for node in tree.body:
        match node:
            case ast.ImportFrom(names=aliases):
                names |= {alias.asname for alias in aliases if alias.asname == alias.name}
            case ast.If(test=ast.Name(id="_TYPE_CHECKING"), body=body):
                # Imported when it is first used; type checkers read it here.
                names |= public_names(ast.Module(body, []))
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names(module: str):
    imported = importlib.import_module(module)
    assert imported.__file__ is not None
    assert public_names(Path(imported.__file__).read_text()) == PUBLIC[module]
    assert all(hasattr(imported, name) for name in PUBLIC[module])


@pytest.mark.parametrize("module", ["mx_jax", "mx_jax.formats", "mx_jax.recipes"])
def test_completion_shows_public_names_alone(module: str):
    shown = dir(importlib.import_module(module))
    assert set(shown) - {"__version__"} == PUBLIC[module]


def test_help_is_an_overview_of_what_users_call():
    text = pydoc.plain(pydoc.render_doc(mx_jax))
    assert len(text.splitlines()) < 100
    words = set(re.findall(r"\w+", text.partition("PACKAGE CONTENTS")[0]))
    assert set(PUBLIC["mx_jax"]) - words == set()


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_documented(module: str):
    page = ROOT / "docs" / "api" / f"{module.removeprefix('mx_jax.')}.md"
    words = set(re.findall(r"\w+", page.read_text()))
    assert set(PUBLIC[module]) - NAMESPACES - words == set()
