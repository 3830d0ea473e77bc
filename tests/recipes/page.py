"""The table of docs/recipes.md, made of the recipes: `python -m tests.recipes.page` writes it."""

from pathlib import Path

from mx_jax import recipes
from mx_jax.recipes import MatmulSpec, OperandSpec, Recipe, Residuals

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
HEADER = "| recipe | y: x; W | dx: g; W | dW: g; x | transforms; what is kept |"
PRODUCTS = {"output": "y", "grad_input": "dx", "grad_weight": "dW"}


def named() -> dict[str, Recipe]:
    """Every recipe by the call that makes it, under one name each."""
    by_name = {name: recipes.from_name(name) for name in recipes.names()}
    calls = {f"{name}()": made for name, made in by_name.items() if made.name == name}
    examples = (recipes.weight_only("mxfp4"), recipes.qat("mxfp4"))
    return calls | {made.name.replace("(", '("').replace(")", '")'): made for made in examples}


def table() -> list[str]:
    """The lines of the table."""
    rule = "|---" * (HEADER.count("|") - 1) + "|"
    return [HEADER, rule, *(_row(call, recipe) for call, recipe in named().items())]


def calls_of(header: str, page: str) -> list[str]:
    """The first column of the table with that header."""
    lines = page[page.index(header) :].partition("\n\n")[0].splitlines()[2:]
    return [line.split("|")[1].strip().strip("`") for line in lines]


def _row(call: str, recipe: Recipe) -> str:
    specs = {words: getattr(recipe, product) for product, words in PRODUCTS.items()}
    products = [_product(spec) for spec in specs.values()]
    besides = "; ".join(filter(None, (_transforms(specs), _kept(recipe))))
    return f"| `{call}` | {' | '.join(products)} | {besides} |"


def _product(spec: MatmulSpec) -> str:
    """Both operands, in one cell: more columns run out of the page."""
    lhs, rhs = map(_operand, (spec.lhs, spec.rhs))
    return f"both {lhs}" if lhs == rhs else f"{lhs}; {rhs}"


def _operand(spec: OperandSpec | None) -> str:
    if spec is None:
        return "high"
    parts = [f"`{spec.format.name}`", spec.scale_rule.name]
    if spec.rounding.name != "nearest":
        parts.append(spec.rounding.name)
    if spec.prescale != 1.0:
        parts.append(f"times {spec.prescale:g}")
    return ", ".join(parts)


def _transforms(specs: dict[str, MatmulSpec]) -> str:
    """Products with the same transform share a mention."""
    shared: dict[str, list[str]] = {}
    for words, spec in specs.items():
        if spec.transform is not None:
            shared.setdefault(str(spec.transform), []).append(words)
    return "; ".join(f"{', '.join(words)}: {what}" for what, words in shared.items())


def _kept(recipe: Recipe) -> str:
    return {Residuals.PRIMAL: "operands", Residuals.QUANTIZED: "codes"}[recipe.residuals]


def main() -> None:
    """Put the table of today in the page's place for it."""
    page = PAGE.read_text()
    start = page.index(HEADER)
    end = page.index("\n\n", start)
    PAGE.write_text(page[:start] + "\n".join(table()) + page[end:])


if __name__ == "__main__":
    main()
