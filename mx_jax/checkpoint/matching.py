"""Which tensors of a checkpoint are a quantized weight, by names, dtypes and shapes."""

from collections.abc import Mapping

from mx_jax.checkpoint.layout import Facts, Layout
from mx_jax.checkpoint.layouts import LAYOUTS

# Names that only a quantized weight's scales have: one that no weight takes is an error.
SCALE_NAMES = tuple(
    dict.fromkeys(
        suffix
        for layout in LAYOUTS
        for suffix in (layout.scales, layout.tensor_scale)
        if suffix is not None and suffix not in (".scale", ".scales")
    )
)

# What ModelOpt's AWQ and SVDQuant ask of inputs, or add to products. Unread, it would be missed.
_ASKED = (".pre_quant_scale", ".svdquant_lora_a", ".svdquant_lora_b")


def match(
    tensors: Mapping[str, Facts], candidates: tuple[Layout, ...], where: str
) -> dict[str, tuple[str, Layout]]:
    """Which weights are quantized, and how each is stored.

    Args:
      tensors: of a checkpoint, by name.
      candidates: layouts that may be there.
      where: the checkpoint's name, for errors.

    Returns:
      From a weight's name to the base of its tensors' names and its layout.

    Raises:
      ValueError: scales without codes, scales of another shape, a weight that fits two layouts, or
        one that needs more than its codes and scales.
    """
    asked = [name for name in tensors if name.endswith(_ASKED)]
    if asked:
        raise ValueError(
            f"{where}: {len(asked)} tensors such as {asked[0]} belong to weights of AWQ or "
            "SVDQuant, which give nonsense without them, and mx_jax does not apply them; export "
            "the model without"
        )
    found: dict[str, tuple[str, Layout]] = {}
    for weight, (base, rows) in _accepting(tensors, candidates).items():
        fitting = [row for row in rows if row.fits(base, tensors)]
        if not fitting:
            raise ValueError(f"{where}: {weight} {_misfit(rows[0], base, tensors)}")
        if len(fitting) > 1:
            raise ValueError(
                f"{where}: {weight} fits several layouts: {', '.join(r.name for r in fitting)}; "
                "say which with layout=, at the command line with --from"
            )
        found[weight] = base, fitting[0]
    taken = {name for base, row in found.values() for name in row.parts(base).values()}
    left = [name for name in tensors if _is_scales(name, tensors) and name not in taken]
    if left:
        raise ValueError(f"{where}: {_strayed(left, tensors, candidates)}")
    _check_codes([name for name in tensors if name not in taken], tensors, candidates, where)
    return found


def _is_scales(name: str, tensors: Mapping[str, Facts]) -> bool:
    """Whether a tensor is nothing but scales, by its name or its dtype."""
    return name.endswith(SCALE_NAMES) or tensors[name][0] == "F8_E8M0"


def _strayed(left: list[str], tensors: Mapping[str, Facts], candidates: tuple[Layout, ...]) -> str:
    """What is wrong with scales that no weight takes, and what the nearest layout lacks."""
    named = "any layout that mx_jax reads"
    if len(candidates) < len(LAYOUTS):
        named = f"the layouts {', '.join(layout.name for layout in candidates)}"
    facts = ", ".join(f"{name} {_facts(tensors[name])}" for name in left[:3])
    return (
        f"{len(left)} scales belong to no weight of {named}: {facts}; "
        f"{_nearest(left[0], tensors, candidates)}"
    )


def _nearest(name: str, tensors: Mapping[str, Facts], candidates: tuple[Layout, ...]) -> str:
    """What the layout lacks that needs least for a tensor to be its scales."""
    lacks: list[tuple[str, list[str]]] = []
    for row in candidates:
        for suffix in filter(None, (row.scales, row.tensor_scale)):
            base = name.removesuffix(suffix)
            if base != name:
                lacks.append((row.name, row.lacks(base, tensors)))
    if not lacks:
        return "no such layout has scales of this name; mx_jax does not read it"
    row, lack = min(lacks, key=lambda each: len(each[1]))
    return f"{row} needs {' and '.join(lack) or 'codes of whole bytes'}"


def _facts(facts: Facts) -> str:
    return f"{facts[0]}{list(facts[1])}"


def _check_codes(
    names: list[str],
    tensors: Mapping[str, Facts],
    candidates: tuple[Layout, ...],
    where: str,
) -> None:
    """ValueError for codes that no row took: as plain numbers they would be nonsense.

    A bare file may hold float8 or integers without scales, so there it takes a name that only codes
    have, or something beside it that is called a scale.
    """
    stated = len(candidates) < len(LAYOUTS)
    scaled = {name.rpartition(".")[0] for name in tensors if "scale" in name.rpartition(".")[2]}
    for name in names:
        dtype, shape = tensors[name]
        rows = [row for row in candidates if name.endswith(row.codes) and row.codes_dtype == dtype]
        rows = [row for row in rows if len(shape) >= row.least_axes]
        certain = stated or name.rpartition(".")[0] in scaled
        rows = [row for row in rows if certain or row.codes != row.weight]
        if rows:
            row = min(rows, key=lambda row: len(row.lacks(name.removesuffix(row.codes), tensors)))
            lack = row.lacks(name.removesuffix(row.codes), tensors)
            raise ValueError(
                f"{where}: {name} {_facts(tensors[name])} holds codes that no scales belong "
                f"to: {row.name} needs {' and '.join(lack) or 'codes of whole bytes'}; as "
                "plain numbers they would be nonsense"
            )


def _accepting(
    tensors: Mapping[str, Facts], candidates: tuple[Layout, ...]
) -> dict[str, tuple[str, list[Layout]]]:
    """Layouts that a weight may have, by its name, with the base of its tensors' names."""
    found: dict[str, tuple[str, list[Layout]]] = {}
    for layout in candidates:
        for name in tensors:
            base = name.removesuffix(layout.codes)
            if base != name and layout.accepts(base, tensors):
                found.setdefault(base + layout.weight, (base, []))[1].append(layout)
    return found


def _misfit(layout: Layout, base: str, tensors: Mapping[str, Facts]) -> str:
    parts = layout.parts(base)
    shape = layout.shape(tensors[parts["codes"]][1])
    expected, given = layout.scales_shape(shape), tensors[parts["scales"]][1]
    hint = "they may be swizzled for tensor cores, or of another block size"
    if given == (*expected[:-2], *reversed(expected[-2:])):
        hint = "they lie the other way around"
    return (
        f"of shape={shape} in {layout.name} needs scales of shape={expected}, got "
        f"{parts['scales']} of shape={given}; {hint}"
    )
