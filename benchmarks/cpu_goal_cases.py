"""The cases of the goals on a CPU (`benchmarks.cpu_goals`), by group.

The cases of a group run in the same rounds, in a process of their own.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import limits
from benchmarks.cpu_matmul import dot
from benchmarks.data import draw
from benchmarks.onnx_products import int4_products
from benchmarks.timing import Case, measure
from benchmarks.train_step import step_function
from mx_jax import formats, recipes
from mx_jax.backends.calls import Operand
from mx_jax.backends.cpu_ffi import CPU_FFI, library
from mx_jax.backends.select import select
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray
from mx_jax.nn.cache import KVCache
from mx_jax.ops.packing import pack_weights
from mx_jax.ops.quantize import quantize
from mx_jax.packed import PackedMXArray
from mx_jax.testing.cases import MatmulCase

FLOAT32, READ = "jnp.dot float32", "reading the same bytes"
CACHE = "keys and values in {}"
STEP = "training step, {}"
ONNX = "ONNX Runtime, MatMulNBits int4, accuracy level 4"
_MXFP4, _NVFP4, _MXFP8, _MXINT8 = (
    formats.MXFP4,
    formats.NVFP4,
    formats.MXFP8_E4M3,
    formats.MXINT8,
)
Pair = tuple[BlockFormat | None, BlockFormat]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the cases.

    Attributes:
      size: rows and columns of a weight, of a tensor that is cast.
      square: of square products.
      many: weights, or caches of keys and values, which together lie beyond the last level of the
        cache.
      positions: of a cache of keys and values.
    """

    size: int = 4096
    square: int = 2048
    many: int = 16
    positions: int = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Cases of the same rounds.

    Attributes:
      cases: to run.
      left_out: by case that cannot, why.
      work: by bound: the factor from its time to the time of the others' work.
    """

    cases: Sequence[Case]
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    work: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Making:
    """How a group is made.

    Attributes:
      make: in the process that measures it.
      isa: instruction set that the process uses; None: the machine's best.
    """

    make: Callable[[Sizes], Group]
    isa: str | None = None


def _title(pair: Pair, packed: bool = False) -> str:
    lhs, rhs = pair
    return f"{lhs.name if lhs else 'float32'} x {rhs.name}{', packed' if packed else ''}"


def _operand(format: BlockFormat | None, values: Any) -> Operand:
    array = jnp.asarray(values, jnp.float32)
    return array if format is None else quantize(array, format, axis=-1)


def _packed(weights: Operand) -> PackedMXArray:
    assert isinstance(weights, MXArray)
    packed = pack_weights(weights)
    if not isinstance(packed, PackedMXArray):
        raise SystemExit(f"cpu_goals: weights are not packed: {_without_library()}")
    return packed


def _peak(name: str, num_products: int) -> tuple[list[Case], dict[str, float]]:
    """A peak of this core as a case, and how much of it so many products are; nothing without."""
    run = limits.peaks().get(name)
    if run is None:
        return [], {}
    case = Case(f"peak {name}", run)
    return [case], {case.name: num_products / (12 * limits.PEAK_ROUNDS * limits.PEAKS[name])}


def _float32(m: int, n: int, k: int) -> Case:
    """XLA's dot with weights in the order that it multiplies faster."""
    x, w = jnp.asarray(draw("normal", (m, k), 1)), jnp.asarray(draw("normal", (n, k)))
    by_rows, by_columns, wt = jax.jit(dot), jax.jit(jnp.dot), jnp.asarray(np.asarray(w).T)
    both = Case(FLOAT32, lambda: by_rows(x, w)), Case(FLOAT32, lambda: by_columns(x, wt))
    tried = [measure([case], seconds=0, min_rounds=5)[FLOAT32] for case in both]
    return both[0] if min(tried[0].cpu) <= min(tried[1].cpu) else both[1]


def _product(pair: Pair, shape: tuple[int, int, int], w: Any, packed: bool) -> Case:
    """A product of `[m, k]` by weights `w`, `[n, k]`, by the backend that the library selects."""
    m, n, k = shape
    call = MatmulCase(lhs=pair[0], rhs=pair[1], m=(m,), n=(n,), k=(k,)).call
    left, right = _operand(pair[0], draw("normal", (m, k), 1)), _operand(pair[1], w)
    if packed:
        right = _packed(right)
        run = functools.partial(CPU_FFI.run, call)
    else:
        run = functools.partial(select(call).backend.run, call)
    function = jax.jit(run)
    return Case(_title(pair, packed), lambda: function(left, right))


def _without_library() -> str | None:
    loaded = library.load()
    return f"the CPU library is {loaded}" if isinstance(loaded, str) else None


def rows(m: int, pairs: Sequence[Pair], values: Callable[[tuple[int, int]], Any]) -> Making:
    """`m` rows by packed weights of some values, beside float32."""

    def make(sizes: Sizes) -> Group:
        n = k = sizes.size
        cases = [_product(pair, (m, n, k), values((n, k)), packed=True) for pair in pairs]
        bound, work = _peak("fma" if pairs[0][0] is None else "vnni", m * n * k)
        return Group(cases=[_float32(m, n, k), *cases, *bound], work=work)

    return Making(make=make)


def _normal(shape: tuple[int, int]) -> Any:
    return draw("normal", shape)


def _random_codes(shape: tuple[int, int]) -> Any:
    """Every code of E2M1 equally often."""
    values = np.asarray((0, 0.5, 1, 1.5, 2, 3, 4, 6), np.float32)
    rng = np.random.default_rng(0)
    return values[rng.integers(0, 8, shape)] * rng.choice((-1, 1), shape)


def squares(sizes: Sizes) -> Group:
    """Quantized square products, beside the core's int8 peak."""
    shape = sizes.square, sizes.square, sizes.square
    pairs = [(format, format) for format in (_MXFP4, formats.MXFP6_E2M3, _MXINT8)]
    cases = [_product(pair, shape, draw("normal", shape[:2]), packed=False) for pair in pairs]
    bound, work = _peak("vnni", sizes.square**3)
    left_out = {} if bound else {"peak vnni": "this machine has no AVX512-VNNI"}
    return Group(cases=[*cases, *bound], left_out=left_out, work=work)


def squares_without_bf16(sizes: Sizes) -> Group:
    """A square product of MXFP8 on an older instruction set, beside float32."""
    pair, shape = (_MXFP8, _MXFP8), (sizes.square, sizes.square, sizes.square)
    why = _without_library()
    if why is not None:
        return Group(cases=[], left_out={_title(pair): why})
    product = _product(pair, shape, draw("normal", shape[:2]), packed=False)
    bound, work = _peak("fma", sizes.square**3)
    return Group(cases=[_float32(*shape), product, *bound], work=work)


def by_set(
    isa: str, m: int, pairs: Sequence[Pair], packed: bool = True, peak: str = "fma256"
) -> Making:
    """`m` rows by weights of 1,024 by 1,024 on a smaller instruction set, beside float32."""
    shape = m, 1024, 1024

    def make(sizes: Sizes) -> Group:
        del sizes
        if why := _without_library():
            return Group(cases=[], left_out={_title(pair, packed): why for pair in pairs})
        w = draw("normal", shape[1:])
        cases = [_product(pair, shape, w, packed) for pair in pairs]
        bound, work = _peak(peak, math.prod(shape))
        return Group(cases=[_float32(*shape), *cases, *bound], work=work)

    return Making(make=make, isa=isa)


def weights_out_of_cache(sizes: Sizes) -> Group:
    """One row, and eight, by each of many weights, beside a read of MXFP4's and ONNX's int4."""
    size, many = sizes.size, sizes.many
    xs = jnp.asarray(draw("normal", (many, 8, size), 1))
    weights = {}
    for format in (_MXFP4, _NVFP4, _MXFP8):
        stored = _operand(format, draw("normal", (size, size)))
        weights[format] = [_packed(stored) for _ in range(many)]
    num_bytes = {
        format: sum(leaf.nbytes for leaf in jax.tree.leaves(copies))
        for format, copies in weights.items()
    }
    pairs = ((None, _MXFP4), (_MXINT8, _MXFP4), (None, _NVFP4), (None, _MXFP8))
    cases, work, left_out = [], {}, {}
    for pair, m in (*((pair, 1) for pair in pairs), ((_MXINT8, _MXFP4), 8)):
        function = jax.jit(functools.partial(_each, pair))
        name = _title(pair, packed=True) + (f", {m} rows" if m > 1 else "")
        cases.append(Case(name, functools.partial(function, xs[:, :m], weights[pair[1]])))
        work[name] = num_bytes[_MXFP4] / num_bytes[pair[1]]
    data = jnp.zeros(num_bytes[_MXFP4], jnp.uint8) + 1
    read = jax.jit(limits.copy(num_bytes[_MXFP4], 64))
    cases.append(Case(READ, functools.partial(read, data)))
    try:
        cases.append(Case(ONNX, int4_products(np.asarray(xs[0, :1]), many)))
    except ImportError as error:
        left_out[ONNX] = f"cannot import {error.name}"
    return Group(cases=cases, left_out=left_out, work=work)


def _each(pair: Pair, xs: jax.Array, weights: Sequence[PackedMXArray]) -> list[jax.Array]:
    """The products; a quantized left operand is quantized here, for each."""
    n, k = weights[0].shape
    call = MatmulCase(lhs=pair[0], rhs=pair[1], m=(xs.shape[1],), n=(n,), k=(k,)).call
    return [CPU_FFI.run(call, _operand(pair[0], x), w) for x, w in zip(xs, weights, strict=True)]


def casts(sizes: Sizes) -> Group:
    """One tensor with blocks along its rows, and along its columns."""
    x = jnp.asarray(draw("normal", (sizes.size, sizes.size)))
    cases = []
    for words, axis in (("rows", -1), ("columns", 0)):
        cast = jax.jit(functools.partial(quantize, format=_MXFP8, axis=axis))
        name = f"float32 to {_MXFP8.name} by {words}"
        cases.append(Case(name, functools.partial(cast, x)))
    return Group(cases=cases)


def steps(sizes: Sizes) -> Group:
    """Output and both gradients of a product of 1,024^3, by recipe, beside float32's."""
    del sizes
    names = ("high_precision", "mxfp4", "mxint8", "mxfp8", "nvfp4")
    x, w, g = (jnp.asarray(draw("normal", (1024, 1024), seed)) for seed in range(3))
    runs = {name: step_function(getattr(recipes, name)()) for name in names}
    return Group(
        cases=[Case(STEP.format(name), functools.partial(runs[name], x, w, g)) for name in names]
    )


def attention(sizes: Sizes) -> Group:
    """One token over each of many caches, in the shape of SmolLM2-135M's layers."""
    heads, features = 3, 64
    query = jnp.asarray(draw("normal", (1, 1, 3 * heads, features), 1))
    rows = jnp.asarray(draw("normal", (1, sizes.positions, heads, features)))
    append, cases = jax.jit(KVCache.append), []
    for format in (None, _MXFP8, _MXFP4, _NVFP4):
        cache = KVCache.zeros(1, sizes.positions, heads, features, format=format)
        caches = [append(cache, rows, rows, 0) for _ in range(sizes.many)]
        attend = jax.jit(
            lambda x, caches: [cache.attend(x, sizes.positions - 1) for cache in caches]
        )
        name = CACHE.format("float32" if format is None else format.name)
        cases.append(Case(name, functools.partial(attend, query, caches)))
    return Group(cases=cases)


GROUPS: dict[str, Making] = {
    "1 row": rows(1, [(None, _MXFP4), (None, _MXFP8)], _normal),
    "32 rows": rows(32, [(_MXINT8, _MXFP4), (_MXFP4, _MXFP4)], _normal),
    "1 row, weights beyond the cache": Making(make=weights_out_of_cache),
    "square": Making(make=squares),
    "square without AVX512-BF16": Making(make=squares_without_bf16, isa="avx512_vnni"),
    "8 rows, random codes": rows(8, [(None, _NVFP4)], _random_codes),
    "32 rows, random codes": rows(32, [(None, _NVFP4)], _random_codes),
    "casts": Making(make=casts),
    "attention over 2,048 positions": Making(make=attention),
}
_INTEGERS = (_MXFP4, formats.MXFP6_E2M3, _MXINT8)
_EACH = [(None, format) for format in (_MXFP4, _NVFP4, _MXFP8, *_INTEGERS[1:], formats.MXFP6_E3M2)]
for _isa, _peak_name in (("avx2", "maddubs256"), ("avx2_vnni", "vnni256")):
    GROUPS |= {
        f"{_isa}: 1 row": by_set(_isa, 1, [*_EACH, (_MXINT8, _MXFP4)]),
        f"{_isa}: 32 rows": by_set(_isa, 32, [(_MXINT8, _MXFP4), *_EACH], peak=_peak_name),
        f"{_isa}: 96 rows": by_set(_isa, 96, _EACH),
        f"{_isa}: squares": by_set(
            _isa, 1024, [(format, format) for format in _INTEGERS], packed=False, peak=_peak_name
        ),
        f"{_isa}: steps": Making(make=steps, isa=_isa),
        f"{_isa}: casts": Making(make=casts, isa=_isa),
        f"{_isa}: attention": Making(make=attention, isa=_isa),
    }
