"""A function that torch compiles apart from others of the same code.

Dynamo keeps what it compiles by a function's code. It looks through all graphs of one code at each call, gives up beyond eight, and
forgets all of them at once. Calls that are timed in turns must not share that.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any, cast

_NUMBERS = itertools.count()


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, of which torch.compile knows nothing yet.

    Args:
        function: Written in Python; no method.
    """
    function = cast(types.FunctionType, function)
    code = function.__code__.replace(co_name=f"{function.__code__.co_name}_{next(_NUMBERS)}")
    kept = (function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    own = types.FunctionType(code, *kept)
    own.__kwdefaults__ = function.__kwdefaults__
    return own
