"""What is measured, the most useful first."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mx_jax.backends import evidence
from mx_jax.backends.calls import MatmulCall, PackCall, RaggedCall
from mx_jax.backends.evidence import Kind, Work
from mx_jax.backends.reference import REFERENCE
from mx_jax.backends.select import find
from mx_jax.backends.target import Backend, Target
from mx_jax.formats import MX_FORMATS, block_format
from mx_jax.reference.ragged import layout_length
from mx_jax.testing.cases import MatmulCase, RaggedCase

# The most useful first. Rows of activations, one of each bucket of `evidence.ROWS`; n and k of
# weights: the layers of decoders, for which tiles are chosen too.
_FIRST = ("mxfp4", "mxfp8_e4m3", "nvfp4")
FORMATS = (*_FIRST, *(format.name for format in MX_FORMATS if format.name not in _FIRST))
ROWS = (1, 16, 64, 256, 4096, 8, 32, 128)
SIZES = (
    (8192, 8192),
    (5120, 5120),
    (2880, 2880),
    (8192, 10240),
    (10240, 8192),
    (4096, 4096),
    (11008, 4096),
    (4096, 11008),
)
# (experts, n, k) of mixtures, and rows of all experts together.
EXPERTS = ((8, 14336, 4096), (32, 5760, 2880), (128, 1536, 4096))
RAGGED_ROWS = (64, 512, 4096)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One thing that is checked and timed, in a process of its own.

    Attributes:
      backend: name of the backend whose kernel it is.
      kind: of call.
      formats: names of those of lhs and rhs, None for high precision.
      shape: (m, n, k); of sums over rows that of the forward product.
      dtype: of operands in high precision and of the product.
      packed: whether the weights are packed before.
      groups: of the rows, each with a matrix of its own, or a sum; 0 where there are none.
      k_first: whether the weights of a product without groups are `[k, n]`.
    """

    backend: str
    kind: Kind
    formats: tuple[str | None, str | None]
    shape: tuple[int, int, int]
    dtype: str = "bfloat16"
    packed: bool = False
    groups: int = 0
    k_first: bool = False

    @property
    def call(self) -> MatmulCall | RaggedCall:
        """What backends see of it."""
        lhs, rhs = (None if name is None else block_format(name) for name in self.formats)
        m, n, k = self.shape
        facts: dict[str, Any] = {"lhs": lhs, "rhs": rhs, "out_dtype": self.dtype}
        if self.groups:
            # Sums: the gradient of the groups' matrices, in blocks along padded rows.
            sums = self.kind == "ragged sums"
            rows = self.layout_rows if sums else m
            facts |= {"sizes": (0,) * self.groups, "rows": rows, "contracts_rows": sums}
            call = RaggedCase(k=k, n=n, **facts).call
        else:
            facts |= {"rhs_k_first": self.k_first, "dtype": self.dtype}
            call = MatmulCase(m=(m,), n=(n,), k=(k,), **facts).call
        packed_by = self.backend if self.packed else None
        rhs_type = dataclasses.replace(call.rhs, packed_by=packed_by)
        return dataclasses.replace(call, rhs=rhs_type, precision=None)

    @property
    def unit(self) -> int:
        """Rows that a group is padded to a multiple of, so that blocks along them end with it."""
        sizes = (block_format(name or "").block[1] for name in self.formats)
        return math.lcm(*(size for size in sizes if isinstance(size, int)))

    @property
    def layout_rows(self) -> int:
        """Rows in the layout whose groups begin with blocks."""
        return layout_length(self.shape[0], self.groups, self.unit)

    @property
    def packing(self) -> PackCall:
        """How its weights are packed."""
        call = self.call
        assert call.rhs.format is not None, self
        return PackCall(
            weights=dataclasses.replace(call.rhs, packed_by=None),
            blocks=call.rhs.axes.blocks(call.rhs.format),
            lhs_format=call.lhs.format,
            dtype=call.out_dtype,
        )

    @property
    def work(self) -> Work:
        """What its measurement stands for."""
        work = Work.of(self.call, self.backend)
        assert work is not None, self
        return work

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> "Case":
        """Of `dataclasses.asdict`, as JSON keeps it."""
        return cls(**{**facts, "formats": tuple(facts["formats"]), "shape": tuple(facts["shape"])})

    def __str__(self) -> str:
        groups = f", {self.groups} groups" if self.groups else ""
        return f"{self.backend}: {self.work}, {' x '.join(map(str, self.shape))}{groups}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is to be measured.

    Attributes:
      formats: names of block formats.
      sizes: (n, k) of weights.
      rows: of activations.
      experts: (experts, n, k) of mixtures.
      ragged_rows: of all experts of a mixture together.
    """

    formats: Sequence[str] = FORMATS
    sizes: Sequence[tuple[int, int]] = SIZES
    rows: Sequence[int] = ROWS
    experts: Sequence[tuple[int, int, int]] = EXPERTS
    ragged_rows: Sequence[int] = RAGGED_ROWS


def all_cases(backend: Backend, wanted: Wanted = Wanted()) -> Iterator[Case]:
    """Everything that one backend may be asked, in no order."""
    of = functools.partial(Case, backend=backend.name)
    products: list[tuple[Kind, int, tuple[int, int, int]]] = [
        ("product", 0, (m, n, k)) for (n, k), m in itertools.product(wanted.sizes, wanted.rows)
    ]
    for (groups, n, k), m in itertools.product(wanted.experts, wanted.ragged_rows):
        products.append(("ragged product", groups, (m, n, k)))
        products.append(("ragged sums", groups, (m, n, k)))
    for format, (kind, groups, shape) in itertools.product(wanted.formats, products):
        if kind == "ragged sums":
            yield of(kind=kind, formats=(format, format), shape=shape, groups=groups)
            continue
        for lhs, packed in itertools.product((None, format), (True, False)):
            if not packed or PackCall in backend.offers:
                formats = lhs, format
                yield of(kind=kind, formats=formats, shape=shape, groups=groups, packed=packed)


def rank(case: Case) -> int:
    """How late it comes: what is early in the lists above, packed, and by bfloat16, is first."""
    m, n, k = case.shape
    found = 3 * (case.kind == "product" and not case.packed) + 3 * (case.formats[0] is not None)
    for value, known in ((case.formats[-1], FORMATS), ((n, k), SIZES), (m, ROWS)):
        found += known.index(value) if value in known else len(known)
    return found


def takes(backend: Backend, case: Case, target: Target) -> bool:
    """Whether a backend computes a case on a machine, from weights that it packed if it says so."""
    if case.packed and backend.rejects(case.packing, target) is not None:
        return False
    return backend.rejects(case.call, target) is None


def cases(backends: Sequence[Backend], target: Target, wanted: Wanted = Wanted()) -> list[Case]:
    """What these backends take on a machine, the most useful first."""
    asked = ((own, case) for own in backends for case in all_cases(own, wanted))
    return sorted((case for own, case in asked if takes(own, case, target)), key=rank)


def default_path(target: Target, wanted: Wanted = Wanted()) -> list[Case]:
    """One case of each family that is computed without any row, by what computes it then."""
    asked = sorted((case for case in all_cases(REFERENCE, wanted) if not case.packed), key=rank)
    found: list[Case] = []
    with evidence.use(()):
        for case in asked:
            if (choice := find(case.call, target)) is not None:
                own = dataclasses.replace(case, backend=choice.backend.name)
                packed = dataclasses.replace(own, packed=True)
                # Weights as `pack_weights` lays them out for activations in high precision.
                lays_out = PackCall in choice.backend.offers and choice.backend != REFERENCE
                if lays_out and case.formats[0] is None and takes(choice.backend, packed, target):
                    own = packed
                found.append(own)
    return one_of_each(found)


def one_of_each(cases: Iterable[Case]) -> list[Case]:
    """The first of each family: of one backend, kind of call, and one or two quantized operands."""
    found: dict[Any, Case] = {}
    for case in cases:
        found.setdefault((case.backend, case.kind, case.formats[0] is None), case)
    return list(found.values())


def copy_bits(case: Case) -> float:
    """Bits that each copy brings through memory: weights; sums write most."""
    _, n, k = case.shape
    bits = block_format(case.formats[1] or case.formats[0] or "").bits_per_element
    if case.kind == "ragged sums":
        return case.layout_rows * n * bits + case.groups * n * k * 16
    return max(case.groups, 1) * n * k * bits
