"""FlexAttention: compiled at more shapes than dynamo keeps; and its masks, types and gradients by the operation's own math path."""

import functools

import pytest
import torch
from torch._higher_order_ops.flex_attention import flex_attention as operation

from nanolib.models import attention
from nanolib.models.attention import flex, sparse
from nanolib.models.attention.patterns import PATTERNS
from nanolib.models.attention.reference import masked_attention, relative_error

OPTIONS = {"pattern": "window", "window": 16, "block_size": 16}


def test_past_dynamos_limit_it_is_compiled_anew_and_never_unfused(monkeypatch):
    """The real limit and the real error, of a function that compiles in no time."""
    monkeypatch.setattr(flex, "flex_attention", _attended)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    flex.compiled.cache_clear()
    resets, reset = [], torch._dynamo.reset
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(1) or reset())
    reset()
    _CALLS.clear()
    with torch._dynamo.config.patch(recompile_limit=3):
        for length in (16, 32, 48, 64, 80):
            for mode in (torch.no_grad, torch.inference_mode):
                q = torch.zeros(1, 1, length, 8)
                with mode():
                    out = attention.attend("flex", q, q, q, causal=True, options=OPTIONS)
                assert out.shape == q.shape
    reset()
    flex.compiled.cache_clear()
    assert len(resets) >= 2 and all(_CALLS)
    assert not torch._dynamo.config.fail_on_recompile_limit_hit  # as others have it


_CALLS: list[bool] = []


def _attended(q, k, v, **rest):
    _CALLS.append(torch.compiler.is_compiling())
    return q * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pattern", sorted(PATTERNS))
def test_outputs_and_gradients_over_the_mask_are_those_of_the_reference(pattern, causal, dtype):
    """A GPU compiles the same operation, gradients too; a CPU's compiler has none."""
    options = sparse.Options(pattern=pattern, block_size=16, **({} if pattern == "window" else {"per_head": True}))
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 80, 8).to(dtype).requires_grad_() for _ in range(3))
    mask = sparse.choose_mask(q, k, causal=causal, options=options)
    tuples = flex.flex_mask(mask, q).as_tuple()
    out = operation(q, k, v, lambda score, *_: score, tuples, 8**-0.5, {}, (), ())[0]
    plans = [mask.elements(head) for head in range(len(mask.plans))]
    elements = torch.stack(plans).unflatten(0, (2, 4)) if len(plans) > 1 else plans[0]
    reference = masked_attention(q, k, v, elements)
    grad = torch.randn_like(reference)
    found = torch.autograd.grad(out, (q, k, v), grad.to(dtype))
    exact = torch.autograd.grad(reference, (q, k, v), grad)
    allowed = 1e-5 if dtype is torch.float32 else 2e-2
    assert relative_error(out, reference) < allowed
    assert all(relative_error(a, b) < 10 * allowed for a, b in zip(found, exact, strict=True))


def test_on_a_gpu_it_skips_by_tiles_that_its_kernels_take():
    assert [flex.kernel_tile("cuda", size) for size in (16, 64, 128, 200, 256)] == [128, 128, 128, 256, 256]
    assert flex.kernel_tile("cpu", 16) == 16
