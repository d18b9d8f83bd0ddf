"""Import names from private modules of torch, and plan on tensors without data, in one place.

A new version of torch may move or change each of these names. Modules that work without torch do
not import this module. Private modules that nanolib loads late, such as those of FlexAttention, are
imported by the modules that use them.
"""

# A plan within a plan uses the mode of the outer plan. torch cannot mix tensors of two modes.
from torch._guards import detect_fake_mode

# Plans run on tensors without data, and torch raises an exception if the work depends on data.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

# Meters observe torch's operations with a dispatch mode. nanolib computes masks outside all modes.
# Within a mode, nanolib does not compile the loops of the CPU kernel, so the mode observes each
# operation of the loops.
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

# The cache of a Hugging Face model nests its tensors in lists and dictionaries.
from torch.utils._pytree import tree_leaves

from nanolib.measurement import cause

disable_dispatch_modes, dispatch_modes = _disable_current_modes, _get_current_dispatch_mode_stack


def fake_tensors() -> FakeTensorMode:
    """Return a mode in which tensors have shape, dtype and device but no data.

    torch cannot mix tensors of two modes, so nested contexts use the same mode.
    """
    return detect_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True)


def describe_plan_failure(error: BaseException) -> str:
    """Describe in one line why a plan on fake tensors failed."""
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return (
            f"the work depends on data, but a plan has no data ({error.func}); run the work instead"
        )
    return cause(error)
