"""Drawings of formats for the docs: blocks bit by bit, number lines, scale rules, a training step.

    python examples/numerics_pictures.py

Each picture says in its metadata which numbers it shows, and a test compares them with the
script's: draw them again after a change.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parent / "findings"))
from findings_figure import BLUE, COLORS, GRAY, RED, digest, panels, parse_no_options, save

import mx_jax
from mx_jax.formats import E2M1, E2M3, E3M2, E4M3, E5M2, INT8, ElementFormat

FOLDER = Path(__file__).parents[1] / "docs" / "images" / "numerics"
ELEMENTS = (E2M1, E2M3, E3M2, E4M3, E5M2, INT8)
GATHERED = ("mxfp4", "mxfp8_e4m3")
PRODUCTS = {"output": "y = x W", "grad_input": "dx = g Wᵀ", "grad_weight": "dW = xᵀ g"}
RULES = ("floor", "ceil", "even", "rceil")
FORMATS = ("mxfp4", "nvfp4", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp8_e5m2", "mxfp8_e4m3", "mxint8")
# Powers of two below the block's largest value, in quarters.
AMPLITUDES = np.arange(0, 18.01, 0.25)


def positive_values(element: ElementFormat) -> list[float]:
    """The values of an element's positive codes, over the largest of them."""
    codes = range(1, element.max_code + 1)
    values = [element.value(code) for code in codes]
    return sorted(float(value) / float(element.max) for value in values if value and value > 0)


def block() -> np.ndarray:
    """32 normal values; the largest, 6.5, lies above E2M1's largest code under a scale of 1."""
    x = np.random.default_rng(4).normal(size=32).astype(np.float32)
    return x * (6.5 / np.abs(x).max()).astype(np.float32)


def by_rule(rule: str) -> dict[str, Any]:
    """The block as MXFP4, its scale, and the signal to noise ratio."""
    x = block()
    array = mx_jax.quantize(x, "mxfp4", scale_rule=rule)
    values = np.asarray(mx_jax.dequantize(array), np.float64)
    scale = float(np.asarray(array.scales).item()) - 127
    noise = np.square(x - values).sum()
    return {
        "before": x.tolist(),
        "after": values.tolist(),
        "scale": 2.0**scale,
        "sqnr": round(10 * float(np.log10(np.square(x).sum() / noise)), 2),
    }


def error_by_amplitude(format: str) -> list[float]:
    """Root mean square of the relative error of values so far below their block's largest."""
    rng = np.random.default_rng(0)
    size = mx_jax.quantize(np.ones(32, np.float32), format).blocks[-1][1]
    rows = 64
    drawn = rng.uniform(1, 2, (len(AMPLITUDES), rows, size)) * rng.choice((-1, 1), size)
    # The largest of each block, with a mantissa of its own; the others below it.
    largest = rng.uniform(1, 2, (len(AMPLITUDES), rows))
    drawn *= (2.0**-AMPLITUDES)[:, None, None] * largest[..., None] / 2
    drawn[..., 0] = largest
    x = drawn.reshape(-1, size).astype(np.float32)
    values = np.asarray(mx_jax.cast(x, format, axis=-1), np.float64)
    error = np.square((values - x) / x).reshape(drawn.shape)[..., 1:]
    return [round(float(value), 5) for value in np.sqrt(error.mean(axis=(1, 2)))]


def bit_fields(format: str) -> dict[str, Any]:
    """Bits of a scale, and of the fields of one element."""
    block_format = mx_jax.formats.block_format(format)
    # An integer has a sign and digits.
    exponent = block_format.element.exponent_bits if block_format.element.kind == "float" else 0
    return {
        "block": block_format.block[1],
        "scale": block_format.scale.bits,
        "sign": 1,
        "exponent": exponent,
        "mantissa": block_format.element.bits - 1 - exponent,
        "each": block_format.bits_per_element,
    }


def operands(product: str) -> list[tuple[str, str, str, str]]:
    """Name, rows, columns and contracted axis of both operands of a product."""
    if product == "output":
        return [("x", "M", "K", "K"), ("W", "K", "N", "K")]
    if product == "grad_input":
        return [("g", "M", "N", "N"), ("Wᵀ", "N", "K", "N")]
    return [("xᵀ", "K", "M", "M"), ("g", "M", "N", "M")]


def numbers(name: str) -> Any:
    """The numbers of a picture."""
    if name == "blocks":
        return {format: bit_fields(format) for format in FORMATS}
    if name == "gathered":
        return {name: mx_jax.formats.block_format(name).bits_per_element for name in GATHERED}
    if name == "training_step":
        return {product: operands(product) for product in PRODUCTS}
    if name == "number_lines":
        return {element.name: positive_values(element) for element in ELEMENTS}
    if name == "scale_rules":
        return {rule: by_rule(rule) for rule in RULES}
    return {format: error_by_amplitude(format) for format in FORMATS}


def number_lines(axes: Any) -> None:
    for row, values in enumerate(numbers("number_lines").values()):
        axes.vlines(values, row - 0.3, row + 0.3, colors=BLUE, linewidth=0.8)
        axes.text(1.02, row, f"{len(values)} values", va="center")
    axes.set_yticks(range(len(ELEMENTS)), [element.name for element in ELEMENTS])
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set(xlim=(0, 1.005), xlabel="positive values, over the format's largest")


def scale_rules(axes: Any) -> None:
    for row, rule in enumerate(numbers("scale_rules").values()):
        codes = rule["scale"] * np.asarray(positive_values(E2M1)) * 6
        axes.vlines([*-codes, 0, *codes], row - 0.35, row + 0.35, colors="0.75", linewidth=0.8)
        for before, after in zip(rule["before"], rule["after"], strict=True):
            axes.plot(
                [before, after], [row + 0.15, row - 0.15], color=BLUE, linestyle="-", linewidth=0.9
            )
        axes.plot(rule["before"], [row + 0.15] * 32, ".", color="0.3", markersize=4)
        axes.text(8.8, row, f"scale {rule['scale']:g}\n{rule['sqnr']:.1f} dB", va="center")
    axes.set_yticks(range(len(RULES)), [rule.upper() for rule in RULES])
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set(xlim=(-8.6, 8.6), xlabel="a value (dot), and the MXFP4 value that it becomes (line)")


def amplitude(axes: Any) -> None:
    percent = {
        name: 100 * np.maximum(errors, 1e-4) for name, errors in numbers("amplitude").items()
    }
    places = panels(axes, 2, 4, height=1.7)
    for place, (format, errors) in zip(places.flat, percent.items(), strict=False):
        for other in percent.values():
            place.plot(-AMPLITUDES, other, color="0.8", linestyle="-", linewidth=0.7)
        place.plot(-AMPLITUDES, errors, color=BLUE, linestyle="-", linewidth=1.8)
        place.set_title(format, fontsize=9)
        place.set_yscale("log")
        place.yaxis.set_major_formatter("{x:g}")
    # The one before it is the last of its column, and has the scale.
    places[1, 3].remove()
    places[0, 3].xaxis.set_tick_params(labelbottom=True)
    places[1, 1].set_xlabel("log2 of a value over its block's largest", loc="left")
    places[0, 0].figure.supylabel("error of the value (%)", fontsize=9)


def blocks(axes: Any) -> None:
    """32 values of each format; a field is as long as its bits."""
    colors = {"scale": GRAY, "sign": RED, "exponent": BLUE, "mantissa": "#A6CEE3"}
    for row, bits_of in enumerate(numbers("blocks").values()):
        at = 0
        for position in range(32):
            fields = ["sign", "exponent", "mantissa"]
            if position % bits_of["block"] == 0:
                fields.insert(0, "scale")
            for field in fields:
                bits = bits_of[field]
                axes.barh(row, bits, left=at, height=0.6, color=colors[field], linewidth=0)
                at += bits
            axes.vlines(at, row - 0.3, row + 0.3, colors="white", linewidth=0.6)
        axes.text(at + 4, row, f"{bits_of['each']:g} bits a value", va="center", fontsize=8)
    for field, color in colors.items():
        axes.barh(0, 0, color=color, label={"mantissa": "mantissa or digits"}.get(field, field))
    axes.legend(fontsize=8, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    axes.grid(axis="y", visible=False)
    axes.set_yticks(range(len(FORMATS)), FORMATS)
    axes.invert_yaxis()
    axes.set(xlim=(0, 325), xlabel="bits of 32 values and their scales")


def training_step(axes: Any) -> None:
    """Six casts: stripes are blocks, which run along the contracted axis."""
    sizes = {"M": 4, "K": 3, "N": 2}
    left = 0.0
    for product, pair in numbers("training_step").items():
        axes.text(left + 3.2, 5.4, PRODUCTS[product], ha="center", fontsize=11)
        for color, (name, rows, columns, contracted) in zip((BLUE, RED), pair, strict=True):
            height, width = sizes[rows], sizes[columns]
            low = 2 - height / 2
            for stripe in range(2 * (height if contracted == columns else width)):
                place = {"alpha": 0.75 if stripe % 2 else 0.4, "color": color, "linewidth": 0}
                if contracted == columns:
                    axes.barh(low + stripe / 2 + 0.25, width, left=left, height=0.5, **place)
                else:
                    axes.bar(left + stripe / 2 + 0.25, height, bottom=low, width=0.5, **place)
            axes.text(left + width / 2, 2, name, ha="center", va="center", fontsize=12)
            axes.text(left + width / 2, low - 0.5, columns, ha="center", fontsize=8)
            axes.text(left - 0.25, 2, rows, ha="center", va="center", fontsize=8)
            left += width + 0.8
        left += 1.2
    axes.set(xlim=(-0.6, left - 1.5), ylim=(-0.8, 5.8), aspect="equal")
    axes.figure.set_size_inches(6.4, 2)
    axes.set_axis_off()


def gathered(axes: Any) -> None:
    """FSDP on four devices: what each stores, casts, sends and multiplies by."""
    bits = " or ".join(f"{value:g}" for value in numbers("gathered").values())
    heads = {
        0.0: "stores a quarter of W\n32 bits a value",
        2.6: f"casts it\n{bits} bits",
        5.2: "gathers the codes of all\nno values move",
        8.6: "multiplies its tokens\nby all of W",
    }
    for left, head in heads.items():
        axes.text(left, 4.05, head, va="bottom", fontsize=8)
    for device in range(4):
        low = 3.2 - device
        axes.text(-0.2, low + 0.3, f"device {device}", ha="right", va="center", fontsize=8)
        axes.bar(0.7, 0.6, bottom=low, width=1.4, color=COLORS[device], alpha=0.45)
        axes.bar(2.8, 0.6, bottom=low, width=0.4, color=COLORS[device])
        for other in range(4):
            axes.bar(5.4 + 0.4 * other, 0.6, bottom=low, width=0.4, color=COLORS[other])
            if other != device:
                place = {"color": COLORS[device], "linestyle": "-", "alpha": 0.5, "linewidth": 0.9}
                axes.plot([3.05, 5.15], [low + 0.3, 3.5 - other], **place)
        axes.text(8.6, low + 0.3, "x Q(W)", va="center", fontsize=9)
        axes.annotate(
            "", (8.4, low + 0.3), (7.0, low + 0.3), arrowprops={"arrowstyle": "->", "color": "0.4"}
        )
        axes.annotate(
            "", (2.5, low + 0.3), (1.5, low + 0.3), arrowprops={"arrowstyle": "->", "color": "0.4"}
        )
    axes.set(xlim=(-1.6, 11.2), ylim=(0, 4.9))
    axes.figure.set_size_inches(6.4, 2.7)
    axes.set_axis_off()


# The page and the drawing function of each.
PICTURES = {
    "number_lines": ("numerics", number_lines),
    "scale_rules": ("numerics", scale_rules),
    "amplitude": ("numerics", amplitude),
    "blocks": ("quantize", blocks),
    "training_step": ("recipes", training_step),
    "gathered": ("sharding", gathered),
}


def main() -> None:
    for name, (_, draw) in PICTURES.items():
        save(name, draw, FOLDER, description=digest(Path(__file__), numbers=numbers(name)))


if __name__ == "__main__":
    parse_no_options(__doc__)
    main()
