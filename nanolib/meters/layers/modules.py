"""Choose the modules of a model that are timed, and replace their methods."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

Forward = Callable[..., Any]
Replacement = tuple[nn.Module, str, Forward]


def find_blocks(model: nn.Module) -> list[str]:
    """List the names of a model's repeated blocks, which are the members of its `ModuleList`s."""
    return [
        f"{name}.{key}".lstrip(".")
        for name, parts in model.named_modules()
        if isinstance(parts, nn.ModuleList)
        for key, _ in parts.named_children()
    ]


def choose_modules(
    model: nn.Module, blocks: Sequence[str], every_nth: int
) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Choose the modules that are timed in each call, and those timed in detailed calls.

    Args:
        model: Any module.
        blocks: Names of the model's repeated blocks.
        every_nth: Choose the modules of each n-th block only, or of no block if n is 0.

    Returns:
        Name → module: blocks and the leaves outside them, and then the modules inside blocks.
    """
    outer, inner = {}, {}
    inside = tuple(f"{block}." for block in blocks)
    detailed = inside[::every_nth] if every_nth else ()
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            continue
        if name.startswith(detailed):
            inner[name] = module
        is_leaf = name and not any(module.children())
        if name in blocks or (is_leaf and not name.startswith(inside)):
            outer[name] = module
    return outer, inner


def wrap_forwards(
    modules: Mapping[str, nn.Module], wrap: Callable[[str, Forward], Forward]
) -> list[Replacement]:
    """Wrap the `forward` of modules, for `replace_methods`."""
    return [(module, "forward", wrap(name, module.forward)) for name, module in modules.items()]


@contextlib.contextmanager
def replace_methods(functions: Sequence[Replacement]) -> Iterator[None]:
    """Replace methods in the block, without `Module.__setattr__`, which is slow.

    Args:
        functions: Module, name of its method, and the function that replaces the method.
    """
    before = [vars(module).get(name) for module, name, _ in functions]
    for module, name, function in functions:
        vars(module)[name] = function
    try:
        yield
    finally:
        for (module, name, _), own in zip(functions, before, strict=True):
            if own is None:
                del vars(module)[name]  # Deleting restores the method of the class.
            else:
                vars(module)[name] = own
