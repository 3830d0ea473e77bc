"""Small programs that stand for all of the library: what they compute, move and call is recorded.

Operands are multiples of 1/128 below 1.75 in magnitude, and their largest values make float32
scales powers of two. So sums need no rounding, whatever adds them up in whatever order: results are
equal bit for bit on every machine. Where that cannot be, a program says so (`rounded`).
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mx_jax
from examples.recipes.quartet_ii import quartet_ii
from mx_jax import convert, recipes
from mx_jax.formats import BLOCK_FORMATS, FLOAT8_BLOCKWISE_2D_E8M0, FLOAT8_BLOCKWISE_E8M0
from mx_jax.nn import KVCache
from mx_jax.packed import Quantized
from mx_jax.sharding import Gather, device_put
from tests.quick import with_gradients
from tests.sharding.collectives import mesh_of

P = PartitionSpec
KEY = 7


class Program(NamedTuple):
    """One row.

    Attributes:
      run: what is compiled.
      operands: its arguments.
      context: in which it is traced, compiled and run, e.g. a mesh.
      results: shardings of the results, or None: the compiler's.
      rounded: which leaves of the results depend on the order of sums, or on exp: compared within
        a tolerance.
      runs: False: it is for a machine that is not there, so it is lowered and read.
    """

    run: Callable[..., Any]
    operands: tuple[Any, ...]
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    results: Any = None
    rounded: tuple[int, ...] = ()
    runs: bool = True


Make = Callable[[], Program]
PROGRAMS: dict[str, Make] = {}


def row(name: str) -> Callable[[Make], Make]:
    """Enter a function that makes a program, under a name."""

    def enter(make: Make) -> Make:
        assert name not in PROGRAMS, name
        PROGRAMS[name] = make
        return make

    return enter


def rows(names: Any, prefix: str) -> Callable[[Callable[[str], Program]], Any]:
    """Enter a function that makes a program of each name."""

    def enter(make: Callable[[str], Program]) -> Any:
        for name in names:
            row(f"{prefix} {name}")(functools.partial(make, name))
        return make

    return enter


def drawn(seed: int, *shape: int, peak: float = 1.75) -> np.ndarray:
    """Multiples of 1/128 over some octaves, 16 by 16 tiles of two sizes, with 1.75 in each line.

    `peak` is the first element: 2688 / 256 makes NVFP4's tensor scale a power of two.
    """
    rng = np.random.default_rng(seed)
    tiles = rng.integers(0, 2, tuple(-(-size // 16) for size in shape))
    for axis, size in enumerate(shape):
        tiles = np.repeat(tiles, 16, axis).take(range(size), axis)
    magnitudes = np.round(224 * 2.0 ** -rng.uniform(0, 3, shape) / 2.0**tiles)
    magnitudes[sum(np.ogrid[tuple(slice(size) for size in shape)]) % 64 == 0] = 224
    values = np.where(rng.random(shape) < 0.5, -magnitudes, magnitudes) / 128
    values.flat[0] = peak
    return values.astype(np.float32)


def operands(m: int, k: int, n: int, peak: float = 1.75) -> tuple[np.ndarray, ...]:
    """Input, kernel and cotangent."""
    shapes = (m, k), (k, n), (m, n)
    return tuple(drawn(seed, *shape, peak=peak) for seed, shape in enumerate(shapes))


def peak_of(recipe: Any) -> float:
    """The largest operand for which the forward product's tensor scales are powers of two."""
    spec = recipe.output.rhs
    if spec is None or not spec.format.tensor_scale:
        return 1.75
    return spec.scale_rule.largest_value(spec.format) / 256


def matmul_step(recipe: Any, **options: Any) -> Callable[..., Any]:
    recipe = recipes.from_name(recipe) if isinstance(recipe, str) else recipe
    if recipe.is_stochastic:
        return with_gradients(
            lambda x, w, key: mx_jax.matmul(x, w, recipe=recipe, key=jax.random.key(key), **options)
        )
    return with_gradients(lambda x, w: mx_jax.matmul(x, w, recipe=recipe, **options))


# Recipes ------------------------------------------------------------------------------------------

# Tensor scales of gradients with headroom, and of what Hadamard transforms make of a tensor.
_ROUNDED = {
    "int8_rowwise": (0, 1, 2),
    "quartet_ii": (1, 2),
    "nvfp4_pretraining": (2,),
    "nvfp4_unbiased": (1, 2),
    "nvfp4_four_over_six": (2,),
}


# The recipe of examples/ stands for those that come from outside.
_NAMES = [name for name in recipes.names() if not name.startswith(("tensorw", "roww"))]


@rows([*_NAMES, "quartet_ii"], "matmul")
def _recipe(name: str) -> Program:
    recipe = quartet_ii() if name == "quartet_ii" else recipes.from_name(name)
    peak = peak_of(recipe)
    sizes = (64, 64, 64) if peak > 2 else (128, 256, 128)
    key = (np.uint32(KEY),) if recipe.is_stochastic else ()
    arguments = (*operands(*sizes, peak=peak), *key)
    return Program(matmul_step(recipe), arguments, rounded=_ROUNDED.get(name, ()))


@rows(["mxfp8", "mxfp4", "mxint8"], "matmul, partial blocks, bfloat16:")
def _partial(name: str) -> Program:
    x, w, g = operands(40, 72, 24)
    run = matmul_step(name, preferred_element_type=jnp.float32)
    return Program(run, (jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16), g))


@rows(["mxfp4", "nvfp4", "mxfp8_e4m3", "float8_rowwise_e4m3"], "weight-only, stored:")
def _weight_only(name: str) -> Program:
    recipe = recipes.weight_only(name)
    x, w, g = operands(4, 64, 64, peak=peak_of(recipe))
    w = mx_jax.quantize(w, name, axis=0)

    def run(x: Any, w: Any, g: Any) -> Any:
        y, pullback = jax.vjp(lambda x: mx_jax.matmul(x, w, recipe=recipe), x)
        return y, *pullback(g)

    return Program(run, (x, w, g))


@rows(["mxfp4", "nvfp4", "mxfp6_e3m2", "mxfp8_e4m3"], "weight-only, packed:")
def _packed(name: str) -> Program:
    recipe = recipes.weight_only(name)
    x, w, _ = operands(4, 64, 64, peak=peak_of(recipe))
    w = mx_jax.pack_weights(mx_jax.quantize(w, name, axis=0))
    return Program(lambda x, w: mx_jax.matmul(x, w, recipe=recipe), (x, w))


@row("packed, both quantized: mxfp8")
def _packed_both() -> Program:
    x, w, _ = operands(4, 128, 64)
    w = mx_jax.pack_weights(mx_jax.quantize(w, "mxfp8_e4m3", axis=0), recipe="mxfp8")
    return Program(lambda x, w: mx_jax.matmul(x, w, recipe="mxfp8"), (x, w))


@rows(["mxfp8", "mxfp4", "float8_rowwise"], "ragged_dot")
def _ragged(name: str) -> Program:
    x, g = drawn(0, 128, 128), drawn(2, 128, 64)
    w = drawn(1, 3, 128, 64)
    run = with_gradients(lambda x, w, sizes: mx_jax.ragged_dot(x, w, sizes, recipe=name))
    return Program(run, (x, w, g, np.array([40, 0, 70], np.int32)))


@row("ragged_dot, packed: mxfp4")
def _ragged_packed() -> Program:
    w = mx_jax.quantize(drawn(1, 3, 128, 64), "mxfp4", axis=1)
    w = mx_jax.pack_weights(w, contracting=1, num_batch=1)
    run = lambda x, w, sizes: mx_jax.ragged_dot(x, w, sizes, recipe="mxfp4")  # noqa: E731
    return Program(run, (drawn(0, 8, 128), w, np.array([4, 0, 3], np.int32)))


@rows(["btd,dhk->bthk", "bthk,hkd->btd", "bthd,bshd->bhts"], "einsum mxfp8")
def _einsum(subscripts: str) -> Program:
    sizes = dict(b=2, t=32, s=32, d=64, h=2, k=32)
    inputs, out = subscripts.split("->")
    shapes = [tuple(sizes[c] for c in term) for term in (*inputs.split(","), out)]
    arguments = [drawn(seed, *shape) for seed, shape in enumerate(shapes)]
    return Program(
        with_gradients(lambda x, w: mx_jax.einsum(subscripts, x, w, recipe="mxfp8")),
        tuple(arguments),
    )


@row("vmap over scan: mxfp4")
def _vmap() -> Program:
    x, w = drawn(0, 2, 32, 64), drawn(1, 3, 64, 64)

    def run(x: Any, w: Any) -> Any:
        multiply = lambda x, w: mx_jax.matmul(x, w, recipe="mxfp4")  # noqa: E731
        return lax.scan(lambda x, w: (x, jax.vmap(multiply, (0, None))(x, w)), x, w)[1]

    return Program(run, (x, w))


@row("checkpoint, quantized saved: mxfp8")
def _remat() -> Program:
    def layer(x: Any, w: Any) -> Any:
        return jax.nn.relu(mx_jax.matmul(jax.nn.relu(x), w, recipe="mxfp8"))

    return Program(
        with_gradients(jax.checkpoint(layer, policy=mx_jax.save_quantized)), operands(64, 128, 64)
    )


@row("gradient of a gradient: mxfp8")
def _second() -> Program:
    x, w, g = operands(32, 64, 32)
    multiply = lambda x, w: mx_jax.matmul(x, w, recipe="mxfp8")  # noqa: E731

    def run(x: Any, w: Any, g: Any) -> Any:
        of_x = lambda x, w: jnp.vdot(g, multiply(x, w)) + jnp.vdot(x, x) / 2  # noqa: E731
        return jax.grad(lambda x, w: jnp.vdot(jax.grad(of_x)(x, w), x), (0, 1))(x, w)

    return Program(run, (x, w, g))


# Casts --------------------------------------------------------------------------------------------

_FORMATS = {
    format.name: format
    for format in (*BLOCK_FORMATS, FLOAT8_BLOCKWISE_E8M0, FLOAT8_BLOCKWISE_2D_E8M0)
}


def wild(seed: int, *shape: int) -> np.ndarray:
    """Any float32: all exponents, subnormals, NaN and Inf among tame rows."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(shape) * 2.0 ** rng.integers(-8, 8, (shape[0], 1))).astype("f4")
    patterns = rng.integers(0, 1 << 32, (shape[0] // 4, *shape[1:]), dtype=np.uint64)
    values[::4] = patterns.astype(np.uint32).view(np.float32)
    values[1] = 0
    values[2] *= np.float32(2.0**-130)
    return values


@rows(_FORMATS, "cast")
def _cast(name: str) -> Program:
    format = _FORMATS[name]
    x = wild(0, 48, 80)
    if format.tensor_scale or not isinstance(format.block[0], int):
        x = x[np.isfinite(x).all(1) & (np.abs(x).max(1) < 1e6)]

    def run(x: Any) -> Any:
        across, along = mx_jax.quantize_both(x, format)
        return along, across, along.dequantize(), mx_jax.dequantize(across, jnp.bfloat16)

    return Program(run, (x,))


@row("cast, each scale rule and rounding: mxfp4")
def _rules() -> Program:
    def run(x: Any) -> Any:
        cast = functools.partial(mx_jax.quantize, x, "mxfp4")
        by_rule = [cast(scale_rule=rule) for rule in ("floor", "ceil", "even", "rceil")]
        return by_rule, [cast(rounding=rounding) for rounding in ("away", "toward_zero")]

    return Program(run, (wild(1, 32, 64),))


@rows(["mxfp8_e5m2", "mxfp4", "nvfp4"], "cast, stochastic:")
def _stochastic(name: str) -> Program:
    def run(x: Any, key: Any) -> Any:
        key = jax.random.key(key)
        return mx_jax.quantize(x, name, axis=0, rounding="stochastic", key=key)

    return Program(run, (drawn(1, 64, 48), np.uint32(KEY)))


# Layers -------------------------------------------------------------------------------------------


def filled(tree: Any) -> Any:
    """Every array of at least one axis drawn anew, others kept."""
    leaves, structure = jax.tree.flatten(tree)
    new = [drawn(seed, *leaf.shape) if leaf.ndim else leaf for seed, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, new)


def loss_step(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Outputs, and gradients by parameters and inputs of their sum."""

    def run(params: Any, x: Any) -> Any:
        y, pullback = jax.vjp(apply, params, x)
        return y, pullback(jnp.ones_like(y))

    return run


def linen_program(model: nn.Module, *shape: int) -> Program:
    x = drawn(9, *shape)
    params = filled(jax.eval_shape(model.init, jax.random.key(0), x))
    return Program(loss_step(model.apply), (params, x))


@row("linen.Dense: mxfp8")
def _dense() -> Program:
    return linen_program(mx_jax.nn.linen.Dense(32, recipe="mxfp8"), 32, 64)


@row("nnx.Linear: mxfp8")
def _linear() -> Program:
    layer = mx_jax.nn.nnx.Linear(64, 32, recipe="mxfp8", rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    return Program(
        loss_step(lambda s, x: nnx.merge(graph, s)(x)), (filled(state), drawn(9, 32, 64))
    )


@row("converted linen model: mxfp8 but the last")
def _converted() -> Program:
    model = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(32)])
    rules = [convert.Rule("layers_2", None), convert.Rule(".*", "mxfp8")]
    converted = convert.linen(model, rules)
    x = drawn(9, 16, 64)
    params = filled(jax.eval_shape(model.init, jax.random.key(0), x))
    return Program(converted.apply, (params, x))


@row("converted linen convolution: mxfp8")
def _convolution() -> Program:
    model = nn.Conv(32, (3, 3))
    x = drawn(9, 2, 8, 8, 32)
    params = filled(jax.eval_shape(model.init, jax.random.key(0), x))
    rule = convert.Rule(".*", "mxfp8", types=nn.Conv)
    return Program(convert.linen(model, rule).apply, (params, x))


@row("converted nnx model: mxfp4")
def _converted_nnx() -> Program:
    model = nnx.Sequential(nnx.Linear(64, 32, rngs=nnx.Rngs(0)), nnx.relu)
    graph, state = nnx.split(convert.nnx(model, convert.Rule(".*", "mxfp4")))
    return Program(
        loss_step(lambda s, x: nnx.merge(graph, s)(x)), (filled(state), drawn(9, 32, 64))
    )


@row("converted weights: mxfp4")
def _converted_weights() -> Program:
    model, x = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(32)]), drawn(9, 4, 64)
    rules = convert.Rule(".*", recipes.weight_only("mxfp4"))
    params = filled(jax.eval_shape(model.init, jax.random.key(0), x))
    return Program(convert.linen(model, rules).apply, (convert.weights(params, rules), x))


@row("converted function with scan: mxfp8")
def _function() -> Program:
    def fn(w: Any, x: Any) -> Any:
        return lax.scan(lambda x, matrix: (x, jax.nn.relu(x @ matrix)), x, w)[1]

    run = convert.function(fn, convert.Rule(".*", "mxfp8"), weights=0)
    return Program(run, (drawn(1, 2, 64, 64), drawn(0, 32, 64)))


@rows(["float32", "mxfp8_e4m3", "nvfp4"], "attention over a cache:")
def _attention(name: str) -> Program:
    format = None if name == "float32" else name
    cache = KVCache.zeros(1, 8, 2, 32, format=format)
    query, keys, values = (drawn(seed, 1, 1, heads, 32) for seed, heads in enumerate((4, 2, 2)))

    def run(cache: Any, query: Any, keys: Any, values: Any) -> Any:
        for position in range(3):
            cache = cache.append(keys * (1 + position), values - position, position)
        return cache.attend(query, 2), cache

    return Program(run, (cache, query, keys, values), rounded=(0,))


# Meshes -------------------------------------------------------------------------------------------

_LAYOUTS = {
    "data": (P("a"), P(), P("a")),
    "FSDP on k": (P("a"), P("a"), P("a")),
    "FSDP on n": (P("a"), P(None, "a"), P("a")),
    "tensor, column": (P(), P(None, "b"), P(None, "b")),
    "tensor, row": (P(None, "b"), P("b"), P()),
    "sequence, column": (P("b"), P(None, "b"), P(None, "b")),
    "FSDP and tensor": (P("a"), P("a", "b"), P("a", "b")),
}


def on_mesh(
    run: Any, arrays: Any, specs: Any, results: Any = None, mesh: Any = None, **options: Any
) -> Program:
    mesh = mesh or mesh_of(a=4, b=2)
    placed = []
    for array, spec in zip(arrays, specs, strict=True):
        put = device_put if isinstance(array, Quantized) else jax.device_put
        placed.append(put(array, NamedSharding(mesh, spec)))
    if results is not None:
        results = tuple(NamedSharding(mesh, spec) for spec in results)
    context = functools.partial(jax.set_mesh, mesh)
    return Program(run, tuple(placed), context, results, **options)


@rows(_LAYOUTS, "mesh, mxfp8, automatic axes:")
def _automatic(layout: str) -> Program:
    x, w, g = _LAYOUTS[layout]
    return on_mesh(matmul_step("mxfp8"), operands(256, 256, 128), (x, w, g), (g, x, w))


@rows(["mxfp4", "float8_tensorwise", "mxfp6"], "mesh, FSDP on k, automatic axes:")
def _automatic_recipes(name: str) -> Program:
    x, w, g = _LAYOUTS["FSDP on k"]
    return on_mesh(matmul_step(name), operands(256, 256, 128), (x, w, g), (g, x, w))


@rows(["FSDP on k", "FSDP on n", "tensor, column", "tensor, row"], "mesh, mxfp4, explicit axes:")
def _explicit(layout: str) -> Program:
    x, w, g = _LAYOUTS[layout]
    numbers = (((1,), (0,)), ((), ()))
    multiply = functools.partial(
        mx_jax.dot_general, dimension_numbers=numbers, recipe="mxfp4", out_sharding=g
    )
    mesh = mesh_of(AxisType.Explicit, a=4, b=2)
    return on_mesh(with_gradients(multiply), operands(256, 256, 128), (x, w, g), mesh=mesh)


@rows(["FSDP on k", "sequence, column"], "mesh, mxfp4, Gather:")
def _gather(layout: str) -> Program:
    x, w, g = _LAYOUTS[layout]
    gather = Gather("a", rhs=w) if layout == "FSDP on k" else Gather("b", lhs=x, rhs=P())
    recipe = dataclasses.replace(recipes.mxfp4(), gather=gather)
    return on_mesh(matmul_step(recipe), operands(256, 256, 128), (x, w, g), (g, x, w))


@rows(["mxfp8", "mxfp4"], "mesh, shard_map, Gather on k:")
def _shard_map(name: str) -> Program:
    mesh = mesh_of(a=4, b=2)
    recipe = dataclasses.replace(recipes.from_name(name), gather=Gather("a", rhs=P("a")))
    specs = (P("a"),) * 3
    run = jax.shard_map(matmul_step(recipe), mesh=mesh, in_specs=specs, out_specs=specs)
    return on_mesh(run, operands(256, 256, 128), specs, mesh=mesh)


@row("mesh, shard_map, experts dispatched: mxfp4")
def _experts() -> Program:
    mesh = mesh_of(a=2, b=1)
    multiply = functools.partial(
        mx_jax.expert_ragged_dot, axis_name="a", recipe="mxfp4", capacity=32
    )
    run = jax.shard_map(
        with_gradients(multiply), mesh=mesh, in_specs=P("a"), out_specs=P("a"), check_vma=False
    )
    sizes = np.array([10, 20, 2, 0, 5, 0, 17, 10], np.int32)
    arrays = drawn(0, 64, 64), drawn(1, 4, 64, 32), drawn(2, 64, 32), sizes
    return on_mesh(run, arrays, (P("a"),) * 4, mesh=mesh)


@row("mesh, ragged_dot, FSDP on k: mxfp4")
def _ragged_mesh() -> Program:
    multiply = functools.partial(mx_jax.ragged_dot, recipe="mxfp4")
    arrays = drawn(0, 128, 128), drawn(1, 3, 128, 64), drawn(2, 128, 64)
    specs = P("a"), P(None, "a"), P("a")
    sizes = np.array([40, 0, 70], np.int32)
    run = with_gradients(lambda x, w, sizes: multiply(x, w, sizes))
    return on_mesh(run, (*arrays, sizes), (*specs, P()), (specs[2], *specs[:2]))


@row("mesh, linen.Dense, FSDP: mxfp8")
def _dense_mesh() -> Program:
    layer = mx_jax.nn.linen.Dense(128, recipe="mxfp8", use_bias=False)
    x = drawn(9, 256, 128)
    arrays = filled(jax.eval_shape(layer.init, jax.random.key(0), x))["params"]["kernel"], x
    apply = lambda w, x: layer.apply({"params": {"kernel": w}}, x)  # noqa: E731
    return on_mesh(loss_step(apply), arrays, (P("a"), P("a")))


# Other machines -----------------------------------------------------------------------------------

_GPUS = {"Hopper": (9, 0), "Blackwell": (10, 0)}
_FOR_GPUS = {
    "mxfp8": lambda x, w: mx_jax.matmul(x, w, recipe="mxfp8"),
    "float8_rowwise": lambda x, w: mx_jax.matmul(x, w, recipe="float8_rowwise"),
    "nvfp4": lambda x, w: mx_jax.matmul(x, w, recipe="nvfp4"),
    "weight-only mxfp4": lambda x, w: mx_jax.matmul(x, w, recipe=recipes.weight_only("mxfp4")),
    "ragged mxfp8": lambda x, w: mx_jax.ragged_dot(
        x, jnp.stack([w, w]), np.array([100, 156], np.int32), recipe="mxfp8"
    ),
}


@rows([f"{gpu}, {case}" for gpu in _GPUS for case in _FOR_GPUS], "lowered for")
def _cuda(name: str) -> Program:
    gpu, case = name.split(", ")
    context = functools.partial(mx_jax.testing.target, "cuda", _GPUS[gpu])
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 256), (256, 256))]
    return Program(_FOR_GPUS[case], tuple(shapes), context, runs=False)


@contextlib.contextmanager
def _kernels_preferred() -> Iterator[None]:
    with mx_jax.testing.target("cuda", _GPUS["Hopper"]), mx_jax.prefer_backends("pallas_gpu"):
        yield


@rows(["matmul", "ragged_dot"], "kernels preferred for Hopper")
def _kernels(name: str) -> Program:
    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        q = mx_jax.quantize(jnp.stack([w, w]) if name == "ragged_dot" else w, "mxfp4", axis=-2)
        if name == "matmul":
            return mx_jax.matmul(x, mx_jax.pack_weights(q), recipe=recipes.weight_only("mxfp4"))
        packed = mx_jax.pack_weights(q, contracting=1, num_batch=1)
        sizes = np.array([100, 156], np.int32)
        return mx_jax.ragged_dot(x, packed, sizes, recipe=recipes.weight_only("mxfp4"))

    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 256), (256, 256))]
    return Program(run, tuple(types), _kernels_preferred, runs=False)
