"""Filters for rules: layers too small to gain, and layers by their number."""

import dataclasses
import math
import re
import sys
from collections.abc import Iterable

from mx_jax.convert.rules import Shape
from mx_jax.formats import BlockFormat, Whole
from mx_jax.ops.arguments import as_recipe
from mx_jax.recipes import MatmulSpec, Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """When a product of `[m, k]` and `[k, n]` is too small to gain.

    Attributes:
      multiple: k and n must be multiples of it.
      too_small: pairs (k, n); no gain where both sizes are at most these. None: any size.
    """

    multiple: int
    too_small: tuple[tuple[int | None, int | None], ...]


# By which axes of an operand share a scale: (all kept axes, all contracting axes). The numbers are
# torchao's, measured on H100: `_auto_filter_for_tensorwise` and `_auto_filter_for_rowwise` of
# torchao 0.18. Formats with blocks have no measured limits; their block is the multiple.
LIMITS: dict[tuple[bool, bool], Limits] = {
    (True, True): Limits(multiple=16, too_small=((4096, 1024),)),
    (False, True): Limits(multiple=16, too_small=((None, 2048), (1024, None), (2048, 4096))),
    (False, False): Limits(multiple=1, too_small=()),
}


@dataclasses.dataclass(frozen=True)
class AutoFilter:
    """Whether a layer is large and aligned enough for its recipe to pay. Pure.

    `convert.gains` is the one without `skip`.

    Attributes:
      skip: layers whose path contains one of these are left out.

    Examples:
      >>> from mx_jax import convert, recipes
      >>> convert.gains("mlp/up", (1024, 4096), recipes.mxfp8())
      True
      >>> convert.gains.why_not("mlp/up", (1000, 4096), recipes.mxfp8())
      'k=1000 is no multiple of 32 (mxfp8_e4m3)'
      >>> convert.AutoFilter(("head",)).why_not("lm_head", (1024, 4096), recipes.mxfp8())
      "the path contains 'head'"
    """

    skip: tuple[str, ...] = ()

    def __call__(self, path: str, shape: Shape, recipe: Recipe | str | None) -> bool:
        """Whether converting the layer should pay; the arguments are a rule's filter's."""
        return self.why_not(path, shape, recipe) is None

    def why_not(self, path: str, shape: Shape, recipe: Recipe | str | None) -> str | None:
        """The reason against converting the layer, or None.

        Args:
          path: of the layer.
          shape: `(*contracting, kept)` of the kernel, or None.
          recipe: what the layer would get, or its name.
        """
        for part in self.skip:
            if part in path:
                return f"the path contains {part!r}"
        if recipe is not None:
            recipe = as_recipe(recipe, type(self).__name__, Recipe)
        if recipe is None or recipe.is_high_precision:
            return "its recipe quantizes nothing"
        if shape is None:
            return "no kernel whose axes are known"
        return _misaligned(shape, recipe) or _too_small(shape, recipe)


gains = AutoFilter()


def _formats(spec: MatmulSpec) -> list[BlockFormat]:
    return [operand.format for operand in (spec.lhs, spec.rhs) if operand is not None]


def _limits(format: BlockFormat) -> Limits:
    kept, contracting = (isinstance(size, Whole) for size in format.block)
    return LIMITS[kept, contracting]


def _misaligned(shape: tuple[int, ...], recipe: Recipe) -> str | None:
    """The product contracts k, the gradient of the input contracts n; the rows are not known."""
    # Blocks lie along the last contracting axis alone.
    k, n = ("k", shape[-2]), ("n", shape[-1])
    for spec, (contracting, kept) in ((recipe.fwd, (k, n)), (recipe.dlhs, (n, k))):
        for format in _formats(spec):
            multiple = _limits(format).multiple
            # Only the right operand is the kernel: its kept blocks lie along the other axis.
            kernel = spec.rhs is not None and format == spec.rhs.format
            kept_block = format.block[0] if kernel else 1
            for (name, size), block in ((contracting, format.block[1]), (kept, kept_block)):
                divisor = multiple if isinstance(block, Whole) else math.lcm(multiple, block)
                if size % divisor:
                    return f"{name}={size} is no multiple of {divisor} ({format.name})"
    return None


def _too_small(shape: tuple[int, ...], recipe: Recipe) -> str | None:
    k, n = math.prod(shape[:-1]), shape[-1]
    for spec in (recipe.fwd, recipe.dlhs, recipe.drhs):
        # One operand alone in low precision saves memory, not time: sizes say nothing then.
        if spec.lhs is None or spec.rhs is None:
            continue
        for format in _formats(spec):
            for k_limit, n_limit in _limits(format).too_small:
                small_k = k_limit is None or k <= k_limit
                if small_k and (n_limit is None or n <= n_limit):
                    limits = [
                        f"{name}={size} <= {limit}"
                        for name, size, limit in (("k", k, k_limit), ("n", n, n_limit))
                        if limit is not None
                    ]
                    return f"too small to gain: {', '.join(limits)} ({format.name})"
    return None


@dataclasses.dataclass(frozen=True)
class Numbered:
    """A filter by the number in a layer's path; build it with `numbered` or `every`.

    Attributes:
      indices: numbers that pass.
      of: regular expression with one group, the number; the first place it is found counts.
      text: how the report calls the numbers.
    """

    indices: range | frozenset[int]
    of: str
    text: str

    def __call__(self, path: str, shape: Shape, recipe: Recipe | None) -> bool:
        """Whether the path's number passes."""
        return self.why_not(path, shape, recipe) is None

    def why_not(self, path: str, shape: Shape, recipe: Recipe | None) -> str | None:
        """The reason against, or None."""
        found = re.search(self.of, path)
        if found is None:
            return f"the path has no number {self.of!r}"
        number = int(found[1])
        return None if number in self.indices else f"{number} is not {self.text}"


def numbered(indices: Iterable[int], *, of: str = r"(\d+)") -> Numbered:
    """A filter that passes layers whose path has one of these numbers.

    Args:
      indices: e.g. `range(54, 62)` for the last eight of 62 blocks, or `{0, 1, 61}`.
      of: regular expression with one group that finds the number; default: the path's first.

    Raises:
      ValueError: an expression with another number of groups.

    Examples:
      >>> from mx_jax import convert
      >>> ends = convert.numbered({0, 11}, of=r"block_(\\d+)")
      >>> keep_ends = convert.Rule(".*", None, filter=ends)
      >>> ends("mlp_0/block_11/up", (64, 64), None), ends("mlp_0/block_7/up", (64, 64), None)
      (True, False)
    """
    entries = indices if isinstance(indices, range) else frozenset(indices)
    text = f"in {entries if isinstance(entries, range) else sorted(entries)}"
    return Numbered(entries, _with_group(of, "numbered"), text)


def every(n: int, *, start: int = 0, of: str = r"(\d+)") -> Numbered:
    """A filter that passes the layers numbered start, start + n, start + 2 n and so on.

    Args:
      n: the step.
      start: the first.
      of: as `numbered` takes it.

    Raises:
      ValueError: a step below 1, or an expression with another number of groups.

    Examples:
      >>> from mx_jax import convert
      >>> fourth = convert.every(4)
      >>> tuple(fourth(f"layers_{i}/up", (64, 64), None) for i in range(6))
      (True, False, False, False, True, False)
    """
    if n < 1:
        raise ValueError(f"every: n must be at least 1, got n={n}")
    text = f"one of {start}, {start + n}, {start + 2 * n}, ..."
    return Numbered(range(start, sys.maxsize, n), _with_group(of, "every"), text)


def _with_group(of: str, operation: str) -> str:
    groups = re.compile(of).groups
    if groups != 1:
        raise ValueError(
            f"{operation}: of needs one group around the number, got of={of!r} with {groups}; "
            r"e.g. of=r'block_(\d+)'"
        )
    return of
