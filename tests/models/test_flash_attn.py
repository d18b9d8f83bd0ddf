"""flash-attn by stub packages of each version: which is found, its arguments, and its errors."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

from nanolib.measurement import Unsupported
from nanolib.models import attention
from nanolib.models.attention import dense
from nanolib.models.attention.reference import causal_mask, masked_attention
from tests.models.inputs import agrees, qkv

STUB = """
import torch

def flash_attn_func(q, k, v, causal):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=True
    ).transpose(1, 2)
    return RETURNED
"""
FILES = {  # version → its file, and what it returns
    2: ("flash_attn/__init__.py", "out"),
    3: ("flash_attn_interface.py", "(out, None)"),
    "3 in its package": ("flash_attn_3/flash_attn_interface.py", "out"),
    4: ("flash_attn/cute/__init__.py", "(out, None)"),
}
BROKEN = 'raise ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c104")\n'
INPUTS = qkv(1, 2, 1, 8, 8)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install stubs of some versions; `broken` are there and cannot be imported."""
    monkeypatch.syspath_prepend(tmp_path)

    def forget():
        dense._import_version.cache_clear()
        for name in [name for name in sys.modules if name.startswith("flash_attn")]:
            del sys.modules[name]

    def install(*versions, broken=()):
        for version in (*versions, *broken):
            name, returned = FILES[version]
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(BROKEN if version in broken else STUB.replace("RETURNED", returned))
        importlib.invalidate_caches()

    forget()
    yield install
    forget()


@pytest.mark.parametrize(
    ("there", "broken", "version", "found"),
    [
        ([2, "3 in its package", 4], [], "auto", 4),
        ([2, "3 in its package"], [], "auto", 3),
        ([2, 3, 4], [], 2, 2),
        ([3], [4, 2], "auto", 3),
        ([4], [2], "auto", 4),
        ([4], [2], 2, None),
        ([], [], "auto", None),
    ],
)
def test_the_version_named_is_called_or_the_newest_and_a_broken_one_hides_no_other(
    install, there, broken, version, found
):
    install(*there, broken=broken)
    assert dense.flash_attn_version(version) == found
    with pytest.raises(Unsupported) as caught:
        attention.attend("flash_attn", *INPUTS, causal=True, options={"version": version})
    said = str(caught.value)
    if found is None:
        assert ("undefined symbol: _ZN3c104" in said) == (version in broken)
        assert 'pip install -e ".[cuda]"' in said
        return
    assert "flash_attn has no cpu kernel" in said
    out = dense.call_flash_attn(found, *INPUTS, True)
    assert agrees(out, masked_attention(*INPUTS, causal_mask(8, 8)), INPUTS)


def test_what_a_version_asserts_is_unsupported(monkeypatch):
    def refuses(*_, **__):
        raise AssertionError("head_dim 16 is not supported on SM 9.x")

    monkeypatch.setattr(dense, "_import_version", lambda version: (refuses, ""))
    with pytest.raises(
        Unsupported, match=r"flash_attn 4 refuses the input \(head_dim 16 is not supported on SM"
    ):
        dense.call_flash_attn(4, *INPUTS, True)


def test_it_takes_short_types_on_a_gpu(monkeypatch):
    monkeypatch.setattr(dense, "flash_attn_version", lambda version: 3)
    monkeypatch.setattr(dense, "call_flash_attn", lambda *x: x)
    gpu = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    rest = {"causal": True, "options": dense.FlashOptions()}
    with pytest.raises(Unsupported, match="computes in float16 and bfloat16, not in float32"):
        dense.attend_by_flash_attn(gpu, gpu, gpu, **rest)
    gpu.dtype = torch.bfloat16
    assert dense.attend_by_flash_attn(gpu, gpu, gpu, **rest) == (3, gpu, gpu, gpu, True)


def test_a_dense_case_names_the_flash_kernels_that_it_runs(monkeypatch):
    """They are swapped when the next case is called, so that versions are never mixed."""
    calls, torchs = [], torch.nn.attention
    monkeypatch.setattr(torchs, "activate_flash_attention_impl", calls.append)
    monkeypatch.setattr(torchs, "restore_flash_attention_impl", lambda: calls.append("torch's"))
    for impl in ("", "FA4", "FA4", "FA3", "", ""):
        dense.activate(impl)
    assert calls == ["FA4", "torch's", "FA3", "torch's"]


def test_missing_flash_kernels_are_unsupported():
    with pytest.raises(
        Unsupported, match=r"impl FA4 is not available \(ModuleNotFoundError: No module named"
    ):
        dense.activate("FA4")
