"""What FlashAttention's backward pass takes beside its tensors, against what torch's allocator counted."""

import pytest
import torch

from nanolib.meters.tensor_bytes import workspace_bytes

MIB = 2**20
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default


class _OnCuda(torch.Tensor):
    """Shape and strides of a tensor on a GPU, without one."""

    @property
    def device(self):
        return torch.device("cuda")


def _tensor(heads, length, head_dim, *, heads_first=True):
    x = torch.empty(1, heads, length, head_dim, dtype=torch.bfloat16, device="meta")
    if not heads_first:
        x = torch.empty(1, length, heads, head_dim, dtype=torch.bfloat16, device="meta").transpose(
            1, 2
        )
    return x.as_subclass(_OnCuda)


def _peak(heads, kv_heads, length, head_dim, **more):
    """Output, its log-sum-exp, three gradients and the workspace."""
    q, k = (_tensor(each, length, head_dim, **more) for each in (heads, kv_heads))
    lse = 4 * heads * length
    return 2 * q.nbytes + 2 * k.nbytes + lse + workspace_bytes(BACKWARD, (q, q, k, k, q))


@pytest.mark.parametrize(
    ("shape", "counted_mib"),  # torch 2.11's allocator, beside q, k, v and the output's gradient
    [
        ((32, 32, 16_384, 128), 1028.0),
        ((32, 32, 16_384, 64), 516.0),
        ((32, 8, 16_384, 128), 1092.0),
    ],
)
def test_the_peak_of_a_backward_pass_is_what_the_allocator_counted(shape, counted_mib):
    assert _peak(*shape) / MIB == pytest.approx(counted_mib, rel=1e-4)


def test_positions_before_heads_need_no_copies():
    heads_first, heads_last = (_peak(8, 8, 1024, 64, heads_first=first) for first in (True, False))
    assert heads_first - heads_last == 2 * _tensor(8, 1024, 64).nbytes


def test_other_operations_and_other_devices_need_none():
    q = torch.empty(1, 2, 16, 8)
    assert (
        workspace_bytes(BACKWARD, (q, q, q, q, q))
        == workspace_bytes(torch.ops.aten.mm.default, (q, q))
        == 0
    )
