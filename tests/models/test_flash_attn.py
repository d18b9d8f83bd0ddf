"""The package flash_attn, which needs CUDA: what it is handed, and what is said where it is not."""

import importlib.machinery
import sys
import types
from types import SimpleNamespace

import pytest
import torch

from nanolib.measurement import BadInput, Unsupported
from nanolib.models import attention
from nanolib.models.attention import flash_attn
from nanolib.models.attention.reference import causal_mask, masked_attention, relative_error
from tests.models.inputs import TOLERANCE, qkv


def test_flash_attn_says_what_it_lacks(monkeypatch):
    q, k, v = (x.detach() for x in qkv(1, 1, 1, 8, 8))
    with pytest.raises(
        Unsupported,
        match="flash_attn is not installed; on a machine with CUDA: pip install flash-attn",
    ):
        attention.attend("flash_attn", q, k, v, causal=True)


@pytest.fixture
def flash_package(monkeypatch):
    """The package as it is found, and nothing in it."""
    package = types.ModuleType("flash_attn")
    package.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    flash_attn.kernel.cache_clear()
    yield package
    flash_attn.kernel.cache_clear()


@pytest.mark.parametrize(
    ("module", "returns"),
    [("flash_attn", "out"), ("flash_attn_interface", "out"), ("flash_attn.cute", "tuple")],
)
def test_flash_attn_is_called_as_either_version_wants_it(
    monkeypatch, flash_package, module, returns
):
    """The package needs CUDA; what it is handed, and how its answer is read, does not."""

    def function(q, k, v, softmax_scale, causal):
        assert (q.shape, softmax_scale, causal) == ((1, 8, 2, 16), 0.5, True)
        out = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)),
            is_causal=True,
            scale=softmax_scale,
            enable_gqa=True,
        ).transpose(1, 2)
        return out if returns == "out" else (out, None)

    holder = flash_package if module == "flash_attn" else types.ModuleType(module)
    holder.flash_attn_func = function
    monkeypatch.setitem(sys.modules, module, holder)
    assert flash_attn.kernel() is function
    q, k, v = (x.detach() for x in qkv(1, 2, 1, 8, 8))
    with pytest.raises(Unsupported, match="flash_attn has no cpu kernel"):
        attention.attend("flash_attn", q, k, v, causal=True)
    out = flash_attn.call(q, k, v, causal=True, scale=0.5)
    assert relative_error(out, masked_attention(q, k, v, causal_mask(8, 8), 0.5)) < TOLERANCE


def test_flash_attn_takes_short_types_on_a_gpu(monkeypatch, flash_package):
    assert flash_attn.kernel() is None
    flash_attn.kernel.cache_clear()
    called = []
    flash_package.flash_attn_func = lambda *x, **rest: called.append(rest) or x[0]
    monkeypatch.setattr(flash_attn, "call", lambda *x, **rest: called.append((x, rest)))
    gpu = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    rest = {"causal": True, "scale": 0.5}
    with pytest.raises(Unsupported, match="computes in float16 and bfloat16, not in float32"):
        flash_attn.attend(gpu, gpu, gpu, options=flash_attn.Options(), **rest)
    for gpu.dtype in (torch.float16, torch.bfloat16):
        flash_attn.attend(gpu, gpu, gpu, options=flash_attn.Options(), **rest)
    assert called == [((gpu, gpu, gpu), rest)] * 2
    with pytest.raises(BadInput, match=r"attention_options\.window: unknown name"):
        flash_attn.Options(window=3)
