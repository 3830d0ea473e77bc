"""What left the package, by its former name; whoever is asked for one says so until 0.3."""

REMOVED: dict[str, str] = {
    "generate": "a program that uses it, `python examples/generate MODEL --prompt TEXT`",
}
"""By the name of a command, recipe, rule, layout or function: what takes its place, in a line."""


def whereabouts(name: object) -> str:
    """What an error adds about a name that left the package, or nothing.

    Examples:
      >>> whereabouts("mxfp8")
      ''
    """
    place = REMOVED.get(str(name).strip().replace("-", "_"))
    return f", which left mx_jax in 0.2: {place}" if place else ""


def missing_attribute(module: str, name: str) -> AttributeError:
    """The error of a module that is asked for a name that it does not have."""
    return AttributeError(f"module {module!r} has no attribute {name!r}{whereabouts(name)}")
