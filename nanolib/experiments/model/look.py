"""Find the memory, FLOPs and memory traffic of a model at one shape, on tensors without data."""

import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import nn

from nanolib.experiments.model.steps import Step
from nanolib.measurement import MemoryKind, Unsupported, one_line
from nanolib.meters.flops import BACKWARD_FACTOR, BytesRead, FlopCount, count_flops, model_flops
from nanolib.models import attention
from nanolib.models.user import hugging_face_config, resolve, silent
from nanolib.run.case import Plan
from nanolib.run.memory_plan import FOLLOWED_BATCH, StackMemory
from nanolib.run.outcome import planning_time_limit
from nanolib.run.process import Died, call_in_process
from nanolib.torch_internals import TorchDispatchMode, describe_plan_failure, fake_tensors

# Time limit of each case of the user's code, s. `planning_time_limit` usually ends a case earlier.
_LIMIT_S = 90.0
# Configurations of the package `transformers` have the number of blocks in one of these fields.
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")


@dataclass(frozen=True)
class CallWork:
    """Work of one call of a model.

    Attributes:
        parameters: Number of weights.
        flops: FLOPs of the timed call. A training step includes the backward pass of the weights
            that get a gradient. Attention counts only the pairs that the mask keeps.
        bytes: Smallest number of bytes that a call must read and write.
        count: Counted FLOPs of a user's model, or None if a formula gave the FLOPs.
    """

    parameters: int
    flops: float
    bytes: int
    count: FlopCount | None = None


@dataclass(frozen=True)
class Look:
    """Memory and work of a case, found on tensors without data.

    Attributes:
        plan: Peak memory by scope, or the reason why there is no plan.
        counted: Work of a user's model. The value is None for a preset, and for a model that needs
            data to run.
    """

    plan: Plan
    counted: CallWork | None = None


class _ProductsOfExperts(TorchDispatchMode):
    """Support the matrix products of experts in all dtypes, on tensors without data.

    torch supports only bfloat16 for these products.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Return an empty result for an unsupported product, and run all other operations."""
        if func is not torch.ops.aten._grouped_mm.default or args[0].dtype is torch.bfloat16:
            return func(*args, **kwargs or {})
        # torch may rename this private function, so only models with experts import the function.
        from torch._meta_registrations import _create_grouped_mm_output_tensor as empty_product

        return empty_product(*args[:3], args[0].dtype)


@contextlib.contextmanager
def without_data(own: bool) -> Iterator[None]:
    """Create tensors without data in the `with` statement, and discard what the model prints.

    Args:
        own: Whether the model is a user's model. Only such a model may print or have experts.
    """
    with contextlib.ExitStack() as contexts:
        contexts.enter_context(fake_tensors())
        contexts.enter_context(silent())
        if own:
            contexts.enter_context(_ProductsOfExperts())
            contexts.enter_context(contextlib.redirect_stdout(io.StringIO()))
        if own and "transformers" in sys.modules:
            # Without data, transformers assumes several sequences per row. A run has no such mask.
            name = "transformers.masking_utils.find_packed_sequence_indices"
            contexts.enter_context(mock.patch(name, lambda position_ids: None))
        yield


_LOOKS = {}  # `case_id` → `Look`
_BLOCKS = {}  # Model and its options → result of `blocks_of`
_STACKS = {}  # `case_id` → `StackMemory`


def look_at(case) -> Look:
    """Return the memory and the work of a `ModelCase`, computed once per process.

    A user's code runs in a separate process.

    Raises:
        BadInput: The model does not exist.
    """
    if case.case_id not in _LOOKS:
        if case.runs_code:
            look_at_code(case.preset, [case])
        else:
            _LOOKS[case.case_id] = _look(case)
    return _LOOKS[case.case_id]


def look_at_code(name: str, cases: Sequence[Any]) -> None:
    """Find the memory and the work of all cases of a user's code, in one separate process.

    Args:
        name: Name of the model's function, such as `package.module:build`.
        cases: Cases of type `ModelCase`. Without cases, nanolib only checks the name.

    Raises:
        BadInput: The model does not exist.
    """
    wanted = {case.case_id: case for case in cases if case.case_id not in _LOOKS}
    if cases and not wanted:
        return
    looks, reason = [], ""
    try:
        for look in call_in_process(_send_looks, name, [*wanted.values()], limit_s=_LIMIT_S):
            looks.append(look)
    except Died as error:
        reason = str(error)
    _LOOKS.update(dict.fromkeys(wanted, Look(Plan(reason=f"not planned: {reason}"))))
    _LOOKS.update(zip(wanted, looks, strict=False))


def _send_looks(send: Callable[[Look], None], name: str, cases: Sequence[Any]):
    resolve(name)
    for case in cases:
        send(_look(case))


def _look(case) -> Look:
    if reason := case.plan_obstacle():
        return Look(Plan(reason=reason))
    plan = Plan()
    try:
        with planning_time_limit():
            found = record_calls(case).breakdowns(case.batch_size)
            plan = Plan({scope: max(each.peak for each in found[scope]) for scope in found})
            with without_data(case.is_own_model):
                return Look(plan, _count(case) if case.is_own_model else None)
    except Unsupported as error:
        return Look(Plan(unsupported_reason=one_line(error)))
    except (Exception, SystemExit) as error:  # The run shows whether the case is valid.
        return Look(replace(plan, reason=f"not planned: {describe_plan_failure(error)}"))


def record_calls(case) -> StackMemory:
    """Record the calls of a case once per process, for all batch sizes.

    A user's code must not depend on the batch size, because nanolib records a large batch.
    """
    case = replace(case, batch_size=FOLLOWED_BATCH)
    if case.case_id not in _STACKS:
        layers, depth = blocks_of(case)

        def make_step(blocks: int) -> Step:
            if not layers:
                return case.step()
            # A list with an entry per block, such as `layer_types`, has equal entries here.
            shorter = {
                name: value[:blocks]
                for name, value in case.overrides.items()
                if isinstance(value, list | tuple) and len(value) == depth
            }
            return replace(case, overrides=case.overrides | shorter | {layers: blocks}).step()

        with without_data(case.is_own_model):
            _STACKS[case.case_id] = StackMemory(depth, make_step)
    return _STACKS[case.case_id]


def blocks_of(case) -> tuple[str, int]:
    """Return the name and value of the option for the number of equal blocks, or ("", 0)."""
    if not case.is_own_model:
        return "num_layers", case.config.num_layers
    if case.runs_code:  # nanolib does not know the options of a user's code.
        return "", 0
    key = f"{case.preset} {case.overrides}"
    if key not in _BLOCKS:
        _BLOCKS[key] = _equal_blocks(case)
    return _BLOCKS[key]


def _equal_blocks(case) -> tuple[str, int]:
    config = hugging_face_config(case.preset, case.overrides)
    known = config.to_dict()
    field = next((name for name in _LAYERS if isinstance(known.get(name), int)), "")
    depth = known.get(field)
    per_layer = [
        value for value in known.values() if isinstance(value, list | tuple) and len(value) == depth
    ]
    if not field or any(len({*map(repr, values)}) > 1 for values in per_layer):
        return "", 0
    with without_data(case.is_own_model):
        parts = case.build().modules()
    stacks = [part for part in parts if isinstance(part, nn.ModuleList) and len(part) == depth]
    equal = len(stacks) == 1 and len(set(map(repr, stacks[0]))) == 1
    return (field, depth) if equal else ("", 0)


def count_by_running(case) -> CallWork:
    """Run the model to count work that depends on data, and store the result for `look_at`."""
    counted = _count(case)
    _LOOKS[case.case_id] = replace(look_at(case), counted=counted)
    return counted


def _count(case) -> CallWork:
    # nanolib counts the eager call: recomputed FLOPs do not count, and autocast adds no FLOPs.
    step = replace(case, optimization="eager").step()
    weights, decodes = list(step.model.parameters()), case.mode == "generation"
    cache = []
    if decodes:  # nanolib counts the first token after the prompt.
        step.generation.prefill()
        cache = step.kinds()[MemoryKind.CACHE]
    with BytesRead([*weights, *cache]) as reads:
        flops = count_flops(step)
    count = sum(weight.numel() for weight in weights)
    learning = sum(weight.numel() for weight in weights if weight.requires_grad)
    moved = _count_moved_elements(case.mode, count, learning) * case.item
    return CallWork(count, flops.kept, reads.bytes if decodes else moved, flops)


def work_of_mask(config, q_len: int, kv_len: int) -> attention.Work | None:
    """Return the work of a preset's attention, or None if the mask depends on the input."""
    options = attention.shared_options(config.attention_type, config.attention_options)
    mask = {"causal": True, "options": options, "heads": config.num_heads}
    return attention.work(config.attention_type, q_len, kv_len, **mask)


def count_by_formula(case) -> CallWork:
    """Compute the work of one call of a preset's model by formula."""
    config, weights = case.config, case.config.parameter_count
    decodes = case.mode == "generation"
    lengths = (1, case.seq_len + 1) if decodes else (case.seq_len, case.seq_len)
    # If the mask depends on the input, all causal pairs count.
    found = work_of_mask(config, *lengths) or attention.work("dense", *lengths, causal=True)
    kept = found.kept
    parts = model_flops(config, case.batch_size, lengths[0], kept)
    moved = _count_moved_elements(case.mode, weights, weights)
    if decodes:
        # A token attends to itself too, but its own key is not in the cache yet.
        keys = round((kept - 1) * config.kv_heads)
        cached = 2 * config.num_layers * case.batch_size * keys * config.head_dim
        moved = config.decoded_parameters(case.batch_size) + cached
    backward = BACKWARD_FACTOR if case.mode == "training" else 0
    return CallWork(weights, parts["total"] * (1 + backward), moved * case.item)


def _count_moved_elements(mode: str, parameters: int, learning: int) -> int:
    """Return the smallest number of elements that a call must read and write.

    A forward pass reads the weights. A training step reads the weights twice and writes the
    gradients. Fused AdamW reads gradients, weights and both states, and writes weights and both
    states.

    Args:
        mode: Mode of the case, such as `training`.
        parameters: Number of weights.
        learning: Number of weights that get a gradient.
    """
    return 2 * parameters + (1 + 4 + 3) * learning if mode == "training" else parameters
