"""Import the names that nanolib uses from private modules of torch, all in one place.

A new version of torch may move or change each name here. The module is not imported by modules that
leave torch unloaded. Private names that torch must load later stay where they are used.
"""

# A plan uses the mode of the plan around it, since tensors of two modes cannot be mixed.
from torch._guards import detect_fake_mode

# Plans run on tensors without data, and torch raises an exception if the work depends on data.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

# Meters see each operation of torch in a mode. Masks are computed outside all modes, and the loops
# of the CPU kernel are not compiled in a mode, so that the mode sees their operations.
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

# The cache of a Hugging Face model nests its tensors in lists and dictionaries.
from torch.utils._pytree import tree_leaves

disable_dispatch_modes, dispatch_modes = _disable_current_modes, _get_current_dispatch_mode_stack
