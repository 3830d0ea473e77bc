"""Which mutants are made: operators of cosmic-ray, two of our own, and what is left out.

Each operator of Python has one or two near replacements, as in mutmut; cosmic-ray's other ones,
such as `a + b` to `a ** b`, fail at once and would only lift the score.
"""

from collections.abc import Iterator

import parso.python.tree as tree
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.plugins import get_operator

from tests.mutation.core import path_of
from tests.mutation.left_out import left_out
from tests.mutation.mutants import Mutant, Place, change

_BINARY = {
    "Add": ["Sub"],
    "Sub": ["Add"],
    "Mul": ["Div"],
    "Div": ["Mul"],
    "FloorDiv": ["Mul"],
    "Mod": ["FloorDiv"],
    "Pow": ["Mul"],
    "LShift": ["RShift"],
    "RShift": ["LShift"],
    "BitAnd": ["BitOr"],
    "BitOr": ["BitAnd"],
    "BitXor": ["BitAnd"],
}
# The boundary, and the opposite.
_COMPARISON = {
    "Lt": ["LtE", "GtE"],
    "LtE": ["Lt", "Gt"],
    "Gt": ["GtE", "LtE"],
    "GtE": ["Gt", "Lt"],
    "Eq": ["NotEq"],
    "NotEq": ["Eq"],
    "Is": ["IsNot"],
    "IsNot": ["Is"],
}
_OTHERS = (
    "NumberReplacer",  # one more, and one less
    "AddNot",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "ReplaceUnaryOperator_Delete_USub",
    "ReplaceUnaryOperator_Delete_Invert",
    "ReplaceUnaryOperator_Delete_Not",
    "ReplaceContinueWithBreak",
    "ZeroIterationForLoop",
)


_PAIRS = (("min", "max"), ("minimum", "maximum"), ("any", "all"), ("zeros", "ones"))
_NAMES = dict([*_PAIRS, *(pair[::-1] for pair in _PAIRS)])


class ReplaceName(Operator):
    """Another function of arrays, where one may be meant for the other."""

    def mutation_positions(self, node):
        if isinstance(node, tree.Name) and node.value in _NAMES and _is_called(node):
            yield node.start_pos, node.end_pos

    def mutate(self, node, index):
        node.value = _NAMES[node.value]
        return node

    @classmethod
    def examples(cls):
        return (Example("jnp.minimum(x, 1)", "jnp.maximum(x, 1)"), Example("any(x)", "all(x)"))


class SwapBranches(Operator):
    """`where(condition, a, b)` to `where(condition, b, a)`."""

    def mutation_positions(self, node):
        if isinstance(node, tree.Name) and node.value == "where" and len(_arguments(node)) == 3:
            yield node.start_pos, node.end_pos

    def mutate(self, node, index):
        _, then, other = _arguments(node)
        siblings = then.parent.children
        first, second = siblings.index(then), siblings.index(other)
        siblings[first], siblings[second] = other, then
        return node

    @classmethod
    def examples(cls):
        return (Example("jnp.where(c, a, b)", "jnp.where(c, b, a)"),)


def _is_called(node: tree.Name) -> bool:
    following = node.get_next_leaf()
    return following is not None and following.value == "(" and node.parent.type != "funcdef"


def _arguments(node: tree.Name) -> list:
    """The positional arguments of a call, whole nodes; none if there is no call."""
    if not _is_called(node):
        return []
    listed = node.get_next_leaf().get_next_sibling()
    if listed is None or listed.type != "arglist":
        return []
    return [part for part in listed.children if part.type not in ("argument", "operator")]


def operators() -> Iterator[tuple[str, Operator]]:
    """Every operator with its name."""
    pairs = [("Binary", _BINARY), ("Comparison", _COMPARISON)]
    names = [
        f"Replace{kind}Operator_{old}_{new}"
        for kind, table in pairs
        for old, replacements in table.items()
        for new in replacements
    ]
    for name in (*names, *_OTHERS):
        yield name, get_operator(f"core/{name}")()
    for own in (ReplaceName, SwapBranches):
        yield own.__name__, own()


def places(module: str) -> list[Place]:
    """Every place of a module, but where a change could by its kind change no number."""
    source = path_of(module).read_text()
    stretches, nodes = left_out(source), list(ast_nodes(get_ast(source)))
    return [
        Place(module, name, occurrence, start[0])
        for name, operator in operators()
        for occurrence, start in enumerate(
            start for node in nodes for start, _ in operator.mutation_positions(node)
        )
        if not any(first <= start < last for first, last in stretches)
    ]


def mutate(place: Place) -> Mutant | None:
    """The mutant of a place; None if it would not compile, which is no mutant."""
    source = path_of(place.module).read_text()
    mutated = mutate_code(source, dict(operators())[place.operator], place.occurrence)
    if mutated is None or mutated == source or not _compiles(mutated):
        return None
    return Mutant(place, *change(source, mutated), mutated)


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def check() -> None:
    """Raise unless our own operators do what they say; cosmic-ray tests its own."""
    for operator in (ReplaceName(), SwapBranches()):
        for example in operator.examples():
            found = mutate_code(example.pre_mutation_code, operator, example.occurrence)
            if found != example.post_mutation_code:
                raise AssertionError(f"{operator}: {example}, made {found!r}")
