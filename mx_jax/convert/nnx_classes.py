"""Classes that stand in for those of nnx layers, and look like them."""

from typing import Any


def standing_for(base: type, own: dict[str, Any]) -> type:
    """A subclass with the name, module and docstring of its base, and attributes of its own."""
    looks = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(base)(base.__name__, (base,), looks | own)
