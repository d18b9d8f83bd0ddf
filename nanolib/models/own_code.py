"""Make torch compile functions separately though they have the same code.

Dynamo caches its graphs by a function's code. It searches all graphs of one code at each call,
gives up after eight, and forgets all of them at once. Calls that are timed in turns must not share
a cache.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any, cast

_NUMBERS = itertools.count()


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a function, so that torch.compile has no graphs of it.

    Args:
        function: A Python function, not a method.
    """
    function = cast(types.FunctionType, function)
    code = function.__code__.replace(co_name=f"{function.__code__.co_name}_{next(_NUMBERS)}")
    kept = (function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    own = types.FunctionType(code, *kept)
    own.__kwdefaults__ = function.__kwdefaults__
    return own
