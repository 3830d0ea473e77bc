"""The named recipes, in the order of `names()`, and the two that cast in the forward product alone.

Each docstring says what happens to each operand of each product. Source facts are cited; where a
paper leaves a choice open, the docstring says which one was taken. Scale rules are by measurement:
see `measured_operand`.
"""

import dataclasses
import re
from collections.abc import Callable

from mx_jax.formats import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, block_format
from mx_jax.formats.block import FormatLike
from mx_jax.ops import current_target
from mx_jax.ops.arguments import NAMED, RECIPES_OF_A_FORMAT
from mx_jax.recipes.base import HIGH, Recipe, measured_operand
from mx_jax.reference.hadamard import Hadamard
from mx_jax.reference.scale_rules import ScaleRule
from mx_jax.specs import MatmulSpec, OperandSpec, Residuals, operand


def named(recipe: Callable[[], Recipe]) -> Callable[[], Recipe]:
    """Enter a recipe by the name of its function."""
    # It is not called yet: float8's formats depend on JAX's platform, and a program may still have
    # to choose it, or to start jax.distributed, when it imports this.
    NAMED[recipe.__name__] = recipe
    return recipe


def _uniform(name: str, format: str) -> Recipe:
    """One format for both operands of all three products."""
    spec = measured_operand(format)
    product = MatmulSpec(lhs=spec, rhs=spec)
    return Recipe(name=name, output=product, grad_input=product, grad_weight=product)


# Stochastic rounding is right on average only where nothing clips.
_THREE_QUARTERS = operand("mxfp4", scale_rule="rceil", rounding="stochastic", prescale=0.75)


# One fixed vector of 16 signs, as a public reference of the NVFP4 recipe has it.
_NVFP4_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


@named
def high_precision() -> Recipe:
    """Nothing is quantized: `jax.lax.dot_general` itself, gradients included.

    Examples:
      >>> from mx_jax import recipes
      >>> recipes.high_precision().is_high_precision, recipes.mxfp4().is_high_precision
      (True, False)
    """
    return Recipe(name="high_precision", output=HIGH, grad_input=HIGH, grad_weight=HIGH)


@named
def mxfp8() -> Recipe:
    """MXFP8 training: E4M3 for activations, weights and gradients, RCEIL scales.

    Source: Recipes for pre-training LLMs with MXFP8, arXiv 2506.08027.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> print(mx_jax.recipes.mxfp8().grad_input)
      mxfp8_e4m3 (rceil, nearest) x mxfp8_e4m3 (rceil, nearest)
      >>> loss = lambda w: mx_jax.matmul(jnp.ones((4, 64)), w, recipe="mxfp8").sum()
      >>> jax.grad(loss)(jnp.ones((64, 8))).shape
      (64, 8)
    """
    return _uniform("mxfp8", "mxfp8_e4m3")


@named
def mxfp8_hybrid() -> Recipe:
    """MXFP8 training with E5M2 gradients: E4M3 for activations and weights, RCEIL scales.

    Examples:
      >>> from mx_jax import recipes
      >>> print(recipes.mxfp8_hybrid().grad_input)
      mxfp8_e5m2 (rceil, nearest) x mxfp8_e4m3 (rceil, nearest)
    """
    return mxfp8().with_(gradients="mxfp8_e5m2", name="mxfp8_hybrid")


@named
def mxfp6() -> Recipe:
    """MXFP6 training: E3M2 everywhere, EVEN scales.

    Source: Rouhani et al., arXiv 2310.10537, whose scales are FLOOR's and whose ties round away
    from zero: `mxfp6().with_(scale_rule="floor", rounding="away")`. EVEN clips less.

    Examples:
      >>> from mx_jax import recipes
      >>> print(recipes.mxfp6().with_(scale_rule="floor", rounding="away").output.lhs)
      mxfp6_e3m2 (floor, away)
    """
    return _uniform("mxfp6", "mxfp6_e3m2")


@named
def mxfp6_e2m3() -> Recipe:
    """MXFP6 training: E2M3 everywhere, EVEN scales.

    A mantissa bit more than `mxfp6` and an exponent bit less, which a block's shared scale makes up
    for: 28 dB a product on normal data, where `mxfp6` has 22.6 and `mxfp8` 28.5.

    Examples:
      >>> from mx_jax import recipes
      >>> for recipe in (recipes.mxfp6(), recipes.mxfp6_e2m3()):
      ...     element = recipe.output.lhs.format.element
      ...     print(element.name, element.mantissa_bits, element.smallest_subnormal, element.max)
      e3m2 2 0.0625 28.0
      e2m3 3 0.125 7.5
    """
    return _uniform("mxfp6_e2m3", "mxfp6_e2m3")


@named
def mxfp4() -> Recipe:
    """Plain MXFP4 training: E2M1 everywhere, EVEN scales, nearest rounding.

    Examples:
      >>> from mx_jax import recipes
      >>> gentle = recipes.mxfp4().with_(gradients="mxfp8_e5m2")
      >>> print(gentle.output.lhs, "|", gentle.grad_input.lhs)
      mxfp4 (even, nearest) | mxfp8_e5m2 (rceil, nearest)
    """
    return _uniform("mxfp4", "mxfp4")


@named
def mxint8() -> Recipe:
    """MXINT8 training: INT8 everywhere, FLOOR scales (MX v1.0, section 5.3.4).

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> print(mx_jax.recipes.mxint8().output.lhs)
      mxint8 (floor, nearest)
      >>> mx_jax.quantize(jnp.array([1.0, 0.5, -0.25]), "mxint8").elements
      Array([ 64,  32, -16], dtype=int8)
    """
    return _uniform("mxint8", "mxint8")


@named
def nvfp4() -> Recipe:
    """Plain NVFP4 training: E2M1 in blocks of 16, E4M3 scales, a float32 scale a tensor.

    Examples:
      >>> from mx_jax import recipes
      >>> format = recipes.nvfp4().output.lhs.format
      >>> format.block, format.scale.name, format.tensor_scale
      ((1, 16), 'e4m3', True)
    """
    return _uniform("nvfp4", "nvfp4")


@named
def mxfp4_backward() -> Recipe:
    """High-precision forward, MXFP4 backward with stochastic rounding and Hadamard transform.

    | product | lhs | rhs |
    |---|---|---|
    | output | high precision | high precision |
    | grad_input | g: MXFP4, RCEIL of 3/4 g, stochastic | W: the same |
    | grad_weight | g: the same | x: the same |

    Both backward products go through a block Hadamard transform of 64 with random signs, and are
    multiplied by 16/9. The paper takes FLOOR's scale of g for 3/4 g, whose block maxima then lie in
    [3, 6) and never clip; RCEIL's scale of 3/4 g puts them in (3, 6], which differs for powers of
    two alone. Needs a key. Source: Tseng et al., Training LLMs with MXFP4, arXiv 2502.20586.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> x, w = jnp.full((4, 64), 0.1), jnp.full((64, 8), 5.1)
      >>> y = mx_jax.matmul(x, w, recipe="mxfp4_backward", key=jax.random.key(0))
      >>> print(f"{y[0, 0] / 64 / 0.1:.1f}")
      5.1
      >>> print(mx_jax.recipes.mxfp4_backward().grad_input.lhs)
      mxfp4 (rceil, stochastic, times 0.75)
    """
    backward = MatmulSpec(
        lhs=_THREE_QUARTERS, rhs=_THREE_QUARTERS, transform=Hadamard(size=64, signs=None)
    )
    return Recipe(name="mxfp4_backward", output=HIGH, grad_input=backward, grad_weight=backward)


@named
def mxfp4_stochastic() -> Recipe:
    """MXFP4 in all three products, with what the literature adds: this library's own mixture.

    | product | lhs | rhs |
    |---|---|---|
    | output | x: MXFP4, EVEN, nearest | W: MXFP4 in blocks of 32 x 32, EVEN, nearest |
    | grad_input | g: MXFP4, RCEIL, stochastic | W: as in the forward product |
    | grad_weight | g: MXFP4, RCEIL, stochastic | x: MXFP4, EVEN, nearest |

    grad_weight goes through a block Hadamard transform of 32 with random signs. RCEIL never clips,
    so stochastic gradients are unbiased; square blocks give both products the same weight, so the
    gradient belongs to the function that was computed. Unbiased is not better everywhere: in the
    small runs of docs/accuracy.md plain `mxfp4` ends no higher. Needs a key.

    Examples:
      >>> from mx_jax import recipes
      >>> recipe = recipes.mxfp4_stochastic()
      >>> print(recipe.grad_input)
      mxfp4 (rceil, stochastic) x mxfp4_2d (even, nearest)
      >>> recipe.is_stochastic, recipe.output.is_stochastic
      (True, False)
    """
    nearest = operand("mxfp4", scale_rule="even")
    weight = operand("mxfp4_2d", scale_rule="even")
    gradient = operand("mxfp4", scale_rule="rceil", rounding="stochastic")
    return Recipe(
        name="mxfp4_stochastic",
        output=MatmulSpec(lhs=nearest, rhs=weight),
        grad_input=MatmulSpec(lhs=gradient, rhs=weight),
        grad_weight=MatmulSpec(lhs=gradient, rhs=nearest, transform=Hadamard(size=32, signs=None)),
    )


@named
def mxfp4_hadamard() -> Recipe:
    """MXFP4 in all three products, and nothing random: a plain Hadamard transform for grad_weight.

    | product | lhs | rhs |
    |---|---|---|
    | output | x: MXFP4, EVEN, nearest | W: the same |
    | grad_input | g: the same | W: the same |
    | grad_weight | g: the same | x: the same |

    grad_weight goes through a block Hadamard transform of 16 without signs. Its authors saw
    training diverge once grad_weight was quantized; this transform kept it stable, where random
    signs and stochastic rounding did not, which is what `mxfp4_stochastic` has. Their scale rule
    is not known to us: EVEN is this library's for MXFP4. Needs no key. Source: Pretraining LLMs
    with MXFP4 on native FP4 hardware, arXiv 2605.09825 (16 points: AMD's notes on MLPerf 6.0).

    Examples:
      >>> from mx_jax import recipes
      >>> recipe = recipes.mxfp4_hadamard()
      >>> recipe.is_stochastic, recipe.output.transform, recipe.grad_weight.transform.size
      (False, None, 16)
    """
    plain = mxfp4()
    grad_weight = dataclasses.replace(
        plain.grad_weight, transform=Hadamard(size=16, signs=(1,) * 16)
    )
    return plain.with_(grad_weight=grad_weight, name="mxfp4_hadamard")


@named
def nvfp4_pretraining() -> Recipe:
    """NVFP4 in all three products, as NVIDIA pre-trained with it.

    | product | lhs | rhs |
    |---|---|---|
    | output | x: NVFP4 1 x 16, nearest | W: NVFP4 16 x 16, nearest |
    | grad_input | g: NVFP4 1 x 16, stochastic | W: as in the forward product |
    | grad_weight | g: NVFP4 1 x 16, stochastic | x: NVFP4 1 x 16, nearest |

    grad_weight goes through a block Hadamard transform of 16 with one fixed vector of signs. The
    paper also keeps about 15 % of the linear layers (the last ones most of all), embeddings, head
    and attention products in high precision: give those layers another recipe. Block scales keep
    E4M3's subnormals, as in the source. Half of the gradient's block maxima clip there, and its
    mean is 0.3 % too short: see `nvfp4_unbiased`. Needs a key.
    Source: Pretraining LLMs with NVFP4, arXiv 2509.25149.

    Examples:
      >>> import flax.linen as nn, jax.numpy as jnp
      >>> from mx_jax import convert
      >>> rules = [convert.Rule("layers_2", None), convert.Rule(".*", "nvfp4_pretraining")]
      >>> model = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])
      >>> print(convert.report(model, rules, jnp.ones((4, 32))))
      layer     type   kernel  rule  recipe
      layers_0  Dense  32x64   1     nvfp4_pretraining
      layers_2  Dense  64x10   0     (kept by its rule)
      1 of 2 layers converted
    """
    nearest = operand("nvfp4", scale_rule="amax_subnormal")
    weight = operand("nvfp4_2d", scale_rule="amax_subnormal")
    gradient = operand("nvfp4", scale_rule="amax_subnormal", rounding="stochastic")
    transform = Hadamard(size=16, signs=_NVFP4_SIGNS)
    return Recipe(
        name="nvfp4_pretraining",
        output=MatmulSpec(lhs=nearest, rhs=weight),
        grad_input=MatmulSpec(lhs=gradient, rhs=weight),
        grad_weight=MatmulSpec(lhs=gradient, rhs=nearest, transform=transform),
    )


@named
def nvfp4_unbiased() -> Recipe:
    """NVFP4 pre-training whose stochastic gradients are right on average: none of them clips.

    As `nvfp4_pretraining`, but a block of the gradient has its largest value at 6 * 16/17. No scale
    rounds down by more than 17/16, so nothing clips. It costs 1 dB of the gradient. Needs a key.
    Source: the NVFP4 baseline of Quartet II, arXiv 2601.22813 (its training code's 17/16; there
    the signs are random).

    Examples:
      >>> from mx_jax import recipes
      >>> print(recipes.nvfp4_unbiased().grad_input)
      nvfp4 (amax_headroom, stochastic) x nvfp4_2d (amax_subnormal, nearest)
    """
    gradients = {"scale_rule": "amax_headroom"}
    return nvfp4_pretraining().with_(gradients=gradients, name="nvfp4_unbiased")


@named
def nvfp4_four_over_six() -> Recipe:
    """NVFP4 pre-training with adaptive block scales.

    As `nvfp4_pretraining`, but each block's largest value is scaled to 6 or to 4, whichever loses
    less, gradients included. Needs a key. Differs from the source in what chooses the gradient's
    scales: the error of rounding to nearest (there that of the rounding that was drawn, which
    prefers small draws). Source: Four Over Six, arXiv 2512.02010, and its library's defaults.

    Examples:
      >>> from mx_jax import recipes
      >>> recipe = recipes.nvfp4_four_over_six()
      >>> print(recipe.output.lhs, "|", recipe.grad_input.lhs)
      nvfp4 (four_over_six, nearest) | nvfp4 (four_over_six, stochastic)
    """
    return nvfp4_pretraining().with_(scale_rule="four_over_six", name="nvfp4_four_over_six")


def _blockwise(name: str, row: str, square: str, rule: str) -> Recipe:
    """Rows of 128 along the contracting axis for x and g, squares for W; codes are saved."""
    x, w = operand(row, scale_rule=rule), operand(square, scale_rule=rule)
    output, grad_weight = MatmulSpec(lhs=x, rhs=w), MatmulSpec(lhs=x, rhs=x)
    return Recipe(
        name=name,
        output=output,
        grad_input=output,
        grad_weight=grad_weight,
        residuals=Residuals.QUANTIZED,
    )


@named
def deepseek_v3() -> Recipe:
    """Blockwise float8: E4M3 and float32 scales in all three products.

    | product | lhs | rhs |
    |---|---|---|
    | output | x: 1 x 128 | W: 128 x 128 |
    | grad_input | g: 1 x 128 | W: the output's codes |
    | grad_weight | g: 128 x 1 | x: the output's codes, dequantized and anew in 128 x 1 |

    Scales are amax / 448, and a code's value is multiplied with them. What is kept of x are its
    codes, as in the source: that second rounding costs grad_weight 1.8 dB on normal data;
    `dataclasses.replace(recipe, residuals="primal")` quantizes x from high precision instead. GPUs
    and TPUs round codes times scales to bfloat16 but by `precision="highest"`. Source: DeepSeek-V3
    technical report, arXiv 2412.19437, section 3.3.

    Examples:
      >>> from mx_jax import recipes
      >>> output = recipes.deepseek_v3().output
      >>> output.lhs.format.block, output.rhs.format.block, output.lhs.format.scale.name
      ((1, 128), (128, 128), 'f32')
    """
    formats = "float8_blockwise_e4m3", "float8_blockwise_2d_e4m3"
    return _blockwise("deepseek_v3", *formats, "amax_multiplier")


@named
def deepseek_v3_1() -> Recipe:
    """`deepseek_v3` with E8M0 scales: E4M3 in the same blocks, scales rounded up (RCEIL).

    The scale is the smallest power of two that is no less than amax / 448, so nothing clips, and
    keeping x as codes costs next to nothing: powers of two move between blocks without rounding,
    but for values near the bottom of E4M3. Source: the "ue8m0" scales of DeepGEMM (`ceil_to_ue8m0`
    in `deep_gemm/utils/math.py`), which DeepSeek-V3.1 is published with; how it was trained is not.

    Examples:
      >>> from mx_jax import recipes
      >>> spec = recipes.deepseek_v3_1().output.lhs
      >>> spec.format.scale.name, spec.scale_rule.name
      ('e8m0', 'rceil')
    """
    return _blockwise("deepseek_v3_1", "float8_blockwise_e8m0", "float8_blockwise_2d_e8m0", "rceil")


@named
def int8_rowwise() -> Recipe:
    """INT8 in all three products, one float32 scale a row or column along the contracting axis.

    Values are multiplied by `max / amax`, and nothing clips. Rounds to nearest, as Qwix does where
    `bwd_qtype="int8"` asks for integers in the backward products; without, it has what
    `qat("int8_rowwise")` is. `with_(gradients={"rounding": "stochastic"})` rounds g as AQT does,
    whose `config_v4` leaves grad_weight in high precision besides: `grad_weight=None`.

    Source: `docs/source/qt.md` of Qwix; `fully_quantized` in `aqt/jax/v2/config.py`. Differs: amax
    becomes 127 (there 127.5) by one division (there by two), and operands are quantized anew for
    each product (in Qwix, g takes on the scales of the forward codes).

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> print(mx_jax.recipes.int8_rowwise().grad_input.lhs)
      int8_rowwise (amax_divisor, nearest)
      >>> mx_jax.quantize(jnp.array([2.0, -1.0, 0.1]), "int8_rowwise").elements
      Array([127, -64,   6], dtype=int8)
    """
    return _uniform("int8_rowwise", "int8_rowwise")


# AMD's GPUs that multiply OCP's float8, as others do: gfx942, MI300, has the fnuz formats alone.
_OCP_ON_ROCM = re.compile("gfx95|gfx12|MI35")


def _float8(granularity: str, element: str, *, power_of_two: bool) -> OperandSpec:
    """A float8 operand in the elements that the machine multiplies, where this is called."""
    format, target = block_format(f"float8_{granularity}_{element}"), current_target()
    if target.platform == "rocm" and not _OCP_ON_ROCM.search(target.device_kind or ""):
        name, fnuz = f"{format.name}fnuz", {E4M3: E4M3FNUZ, E5M2: E5M2FNUZ}
        format = dataclasses.replace(format, name=name, element=fnuz[format.element])
    return operand(format, scale_rule="float8_power_of_two" if power_of_two else "float8")


# The output product alone may be added up in lower precision, as in torchao.


@named
def float8_tensorwise() -> Recipe:
    """One scale a tensor: E4M3 input and weight, E5M2 gradients, in all three products.

    Scales are `max / amax`; values are multiplied, clamped and cast, and the product is divided by
    both scales. On AMD's GPUs that have no other, elements are the fnuz formats.
    Source: torchao.float8, recipe "tensorwise".

    Examples:
      >>> from mx_jax import recipes
      >>> recipe = recipes.float8_tensorwise()
      >>> recipe.output.lhs.format.name, recipe.grad_input.lhs.format.name
      ('float8_tensorwise_e4m3', 'float8_tensorwise_e5m2')
    """
    x, g = (_float8("tensorwise", element, power_of_two=False) for element in ("e4m3", "e5m2"))
    output, backward = MatmulSpec(lhs=x, rhs=x, fast_accumulation=True), MatmulSpec(lhs=g, rhs=x)
    return Recipe(
        name="float8_tensorwise", output=output, grad_input=backward, grad_weight=backward
    )


@named
def float8_rowwise() -> Recipe:
    """One power-of-two scale a row or column: E4M3 everywhere, in all three products.

    Source: torchao.float8, recipe "rowwise".

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> spec = mx_jax.recipes.float8_rowwise().output.lhs
      >>> mx_jax.quantize(jnp.full((2, 64), 3.0), spec.format, scale_rule=spec.scale_rule).scales
      Array([[128.],
             [128.]], dtype=float32)
    """
    spec = _float8("rowwise", "e4m3", power_of_two=True)
    output, backward = (MatmulSpec(lhs=spec, rhs=spec, fast_accumulation=f) for f in (True, False))
    return Recipe(name="float8_rowwise", output=output, grad_input=backward, grad_weight=backward)


@named
def float8_rowwise_with_gw_hp() -> Recipe:
    """Row-wise, with the weight gradient in high precision.

    Output: input and weight row-wise; grad_input: gradient row-wise, weight tensor-wise;
    grad_weight: high precision. E4M3 and power-of-two scales everywhere.
    Source: torchao.float8, recipe "rowwise_with_gw_hp".

    Examples:
      >>> from mx_jax import recipes
      >>> print(recipes.float8_rowwise_with_gw_hp().grad_weight)
      high precision x high precision
    """
    rowwise, name = float8_rowwise(), "float8_rowwise_with_gw_hp"
    weight = _float8("tensorwise", "e4m3", power_of_two=True)
    grad_input = dataclasses.replace(rowwise.grad_input, rhs=weight)
    return rowwise.with_(name=name, grad_input=grad_input, grad_weight=None)


def _forward_only(name: str, lhs: OperandSpec | None, rhs: OperandSpec) -> Recipe:
    """The backward products are in high precision, of what the forward product multiplied."""
    output = MatmulSpec(lhs=lhs, rhs=rhs)
    return Recipe(
        name=name, output=output, grad_input=HIGH, grad_weight=HIGH, residuals=Residuals.QUANTIZED
    )


# torchao's own names for its recipes.
NAMED.update(
    tensorwise=float8_tensorwise,
    rowwise=float8_rowwise,
    rowwise_with_gw_hp=float8_rowwise_with_gw_hp,
)


def weight_only(format: FormatLike, scale_rule: ScaleRule | str | None = None) -> Recipe:
    """Only the right operand (the weight) of the product itself is quantized.

    Activations and both gradient products stay in high precision: for inference, and for
    quantization-aware fine-tuning of weights. `grad_input = g Q(rhs)^T` multiplies the very weight
    that the product multiplied, as the function that ran has it; `grad_weight = lhs^T g` passes
    straight through to the weight, as if its cast were the identity. A weight that is stored, as
    `MXArray` or packed, has no gradient: `mx_jax.nn.split_stored` parts it from what is trained.

    Args:
      format: block format of the weight, as an object, name or dtype.
      scale_rule: rule or name; None: the one that loses least for the format.

    Raises:
      ValueError: unknown names, or a rule that does not fit the format.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> recipe = mx_jax.recipes.weight_only("mxfp4")
      >>> print(recipe.output)
      high precision x mxfp4 (even, nearest)
      >>> y = mx_jax.matmul(jnp.full((4, 64), 0.1), jnp.full((64, 8), 5.1), recipe=recipe)
      >>> print(f"{y[0, 0] / 64 / 0.1:.1f}")
      6.0
    """
    spec = measured_operand(format)
    if scale_rule is not None:
        spec = operand(format, scale_rule=scale_rule)
    return _forward_only(f"weight_only({spec.format.name})", None, spec)


def qat(format: FormatLike, scale_rule: ScaleRule | str | None = None) -> Recipe:
    """Quantization-aware training: quantized forward, high-precision backward.

    The backward products multiply by the very values that the forward product used, dequantized:
    the exact gradient of the quantized function, with each rounding taken as the identity. Quantize
    the trained weights by the same rule, e.g. `weight_only(format, scale_rule)`.

    Args:
      format: block format of both operands, as an object, name or dtype.
      scale_rule: rule or name; None: torchao's default, RCEIL where scales are powers of two.

    Raises:
      ValueError: unknown names, a dtype that is ambiguous, or a rule that does not fit the format.

    Source: torchao's `MXFakeQuantizedLinear` and `NVFP4FakeQuantizedLinear`.

    Examples:
      >>> from mx_jax import recipes
      >>> recipe = recipes.qat("mxfp4")
      >>> print(recipe.output)
      mxfp4 (rceil, nearest) x mxfp4 (rceil, nearest)
      >>> print(recipe.grad_weight, "|", recipe.residuals.value)
      high precision x high precision | quantized
    """
    format = block_format(format)
    if scale_rule is None and format.scale.kind == "exponent":
        scale_rule = "rceil"
    spec = operand(format, scale_rule=scale_rule)
    return _forward_only(f"qat({spec.format.name})", spec, spec)


RECIPES_OF_A_FORMAT.update(weight_only=weight_only, qat=qat)
