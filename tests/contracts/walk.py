"""How far it is from what a user calls to the kernel: `python -m tests.contracts.walk`.

`--draw` prints each walk as a tree of files with the functions entered there, down to the calls
that are bound; `--write` puts that of a Dense layer with its gradients into docs/architecture.md.

A frame is a call of a Python function that is written in a file of mx_jax. Comprehensions are not
counted (Python 3.12 has none), nor is what dataclasses generate, nor what JAX calls to take an
MXArray apart as a tree, and to put it together: no step that a reader follows. For each walk:

- `depth`: frames of mx_jax that are on the stack when a call is bound as an equation, or a kernel
  is called (Pallas's `kernel` and `pallas_call`), at most; `way files`: the files of these.
- `frames`: all that were entered until then and after, `files`: theirs, and `changes`: how often a
  frame was entered that is written in another file than the one before it.

Every walk is traced in full: no jit of JAX and no cache of mx_jax remembers an earlier one. Caches
without arguments (is the C++ library there?) are facts of the machine, and stay; so does what a
format or a recipe knows of itself (its largest code, whether it draws random bits).
"""

import argparse
import contextlib
import dataclasses
import functools
import inspect
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

import mx_jax
from mx_jax.backends.calls import Call
from mx_jax.backends.primitive import bind

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
DRAWING = re.compile(r"(?<=<!-- walk -->\n\n```text\n).*?(?=\n```)", re.DOTALL)
PACKAGE = os.path.dirname(mx_jax.__file__) + os.sep
_INLINED = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
_OF_TREES = ("_flatten", "_flatten_with_keys", "_unflatten")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Walk:
    """What was entered between a call and the end of its trace.

    Attributes:
      ways: for each kernel that was called, what it computes, and (file, function) of the frames
        on the stack, outermost first.
      entered: the file of each frame, in the order in which they were entered.
    """

    ways: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    entered: tuple[str, ...]

    def counts(self) -> dict[str, int]:
        """The numbers that the module describes."""
        longest = max((way for _, way in self.ways), key=len)
        return {
            "depth": len(longest),
            "way files": len({file for file, _ in longest}),
            "frames": len(self.entered),
            "files": len(set(self.entered)),
            "changes": sum(before != after for before, after in itertools.pairwise(self.entered)),
        }


def record(run: Callable[[], Any]) -> Walk:
    """Follow a call from empty caches; the call itself is no frame of mx_jax."""
    run()  # imports what it needs
    clear_caches()
    kernels = _kernels()
    ways: list[tuple[str, tuple[tuple[str, str], ...]]] = []
    entered: list[str] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        file = _file(frame.f_code)
        if file is not None:
            entered.append(file)
        if frame.f_code in kernels:
            ways.append((_computed(frame), _stack(frame)))

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    if not ways:
        raise RuntimeError("walk: no call was bound; is the C++ library here?")
    return Walk(ways=tuple(ways), entered=tuple(entered))


def clear_caches() -> None:
    """Forget what was traced, and what mx_jax remembers for given arguments."""
    jax.clear_caches()
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "mx_jax":
            for value in vars(module).values():
                is_cache = isinstance(value, functools._lru_cache_wrapper)
                if is_cache and inspect.signature(value).parameters:
                    value.cache_clear()


def _kernels() -> frozenset[CodeType]:
    functions: list[Any] = [bind, jax.ffi.ffi_call, pl.pallas_call]
    with contextlib.suppress(ImportError):
        from jax.experimental.pallas import mosaic_gpu

        functions.append(mosaic_gpu.kernel)
    return frozenset(inspect.unwrap(function).__code__ for function in functions)


def _file(code: CodeType) -> str | None:
    """Where a frame is written, inside mx_jax; None elsewhere."""
    if not code.co_filename.startswith(PACKAGE) or code.co_name in _INLINED + _OF_TREES:
        return None
    return code.co_filename[len(PACKAGE) :]


def _computed(frame: FrameType) -> str:
    """The kind of call that is bound, or the name of what is called instead."""
    arguments = jax.tree.leaves(
        [value for value in frame.f_locals.values() if isinstance(value, tuple | Call)],
        is_leaf=lambda value: isinstance(value, Call),
    )
    kinds = [type(value).__name__ for value in arguments if isinstance(value, Call)]
    return kinds[-1] if kinds else frame.f_code.co_name


def _stack(innermost: FrameType) -> tuple[tuple[str, str], ...]:
    frames = []
    frame: FrameType | None = innermost
    while frame is not None:
        file = _file(frame.f_code)
        if file is not None:
            frames.append((file, frame.f_code.co_qualname))
        frame = frame.f_back
    return tuple(frames[::-1])


# The walks ----------------------------------------------------------------------------------------

Run = Callable[[], Any]
X = jax.ShapeDtypeStruct((8, 64), jnp.float32)


@contextlib.contextmanager
def dense_forward(backward: bool = False) -> Iterator[Run]:
    """`mx_jax.nn.linen.Dense` in mxfp8, to the C++ kernels: two casts and a product."""
    layer = mx_jax.nn.linen.Dense(32, recipe="mxfp8")

    def loss(variables: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(layer.apply(variables, x))

    run = jax.grad(loss, argnums=(0, 1)) if backward else layer.apply
    with mx_jax.testing.target("cpu"):
        variables = jax.eval_shape(layer.init, jax.random.key(0), X)
        yield lambda: jax.jit(run).trace(variables, X)


def dense_backward() -> contextlib.AbstractContextManager[Run]:
    """The same with the gradients of input, kernel and bias."""
    return dense_forward(backward=True)


@contextlib.contextmanager
def packed_product() -> Iterator[Run]:
    """`mx_jax.matmul` of float32 by packed MXFP4 weights, to the C++ kernel."""
    recipe = mx_jax.recipes.weight_only("mxfp4")
    with mx_jax.testing.target("cpu"):
        weights = mx_jax.pack_weights(mx_jax.quantize(jnp.ones((64, 32)), "mxfp4", axis=0))

        def product(x: jax.Array, weights: Any) -> jax.Array:
            return mx_jax.matmul(x, weights, recipe=recipe)

        yield lambda: jax.jit(product).trace(X, weights)


@contextlib.contextmanager
def pallas_product() -> Iterator[Run]:
    """`mx_jax.matmul` of bfloat16 by MXFP4 weights, lowered for a Hopper GPU."""
    recipe = mx_jax.recipes.weight_only("mxfp4")
    x = jax.ShapeDtypeStruct((64, 1024), jnp.bfloat16)
    kernel = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)

    def pack(kernel: jax.Array) -> Any:
        return mx_jax.pack_weights(mx_jax.quantize(kernel, "mxfp4", axis=0))

    def product(x: jax.Array, weights: Any) -> jax.Array:
        return mx_jax.matmul(x, weights, recipe=recipe)

    with mx_jax.testing.target("cuda", (9, 0)), mx_jax.prefer_backends("pallas_gpu"):
        weights = jax.eval_shape(pack, kernel)
        yield lambda: jax.jit(product).trace(x, weights).lower(lowering_platforms=("cuda",))


WALKS = (dense_forward, dense_backward, packed_product, pallas_product)


def names() -> tuple[str, ...]:
    """The walks that this JAX can take: Pallas's kernels for GPUs ask for a newer one."""
    return tuple(walk.__name__ for walk in WALKS if walk is not pallas_product or _has_pallas())


def _has_pallas() -> bool:
    return jax.__version_info__ >= (0, 11, 2) and sys.version_info >= (3, 12)


# What is printed ----------------------------------------------------------------------------------


def draw(walk: Walk) -> str:
    """A line for each file that the calls pass on their way, and the functions entered there.

    What two calls in a row share is drawn once; wrappers, defined in functions, are left out.
    """
    lines: list[str] = []
    before: list[tuple[str, str]] = []
    for computed, way in walk.ways:
        named = [(file, function) for file, function in way if "<locals>" not in function]
        steps = [
            (file, ", ".join(function for _, function in frames))
            for file, frames in itertools.groupby(named, key=lambda frame: frame[0])
        ]
        if steps == before:
            lines[-1] += f", {computed}"
            continue
        alike = [a == b for a, b in zip(steps[:-1], before, strict=False)]
        shared = [*alike, False].index(False)
        lines += [f"{'  ' * at}{': '.join(steps[at])}" for at in range(shared, len(steps))]
        lines[-1] += f" -> {computed}"
        before = steps
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.contracts.walk",
        description=str(__doc__),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = [walk.__name__ for walk in WALKS]
    parser.add_argument("walks", nargs="*", metavar="WALK", help=f"default: {', '.join(known)}")
    parser.add_argument("--draw", action="store_true", help="print each walk as a tree of files")
    parser.add_argument("--write", action="store_true", help="draw the walk of the page anew")
    options = parser.parse_args()
    for walk in WALKS:
        if walk.__name__ in (options.walks or names()):
            with walk() as run:
                measured = record(run)
            print(json.dumps({walk.__name__: measured.counts()}))
            if options.draw:
                print(draw(measured))
            if options.write and walk is dense_backward:
                before, after = DRAWING.split(PAGE.read_text(encoding="utf-8"))
                PAGE.write_text(before + draw(measured) + after, encoding="utf-8")


if __name__ == "__main__":
    main()
