"""What a generated token must move: the weights that it reads, and the cache."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanolib.experiments.model.case import GenerationCase
from tests.experiments.own import TINY


class _Read(TorchDispatchMode):
    """Weights that operations take, by storage; of an embedding the rows that are looked up."""

    def __init__(self, model):
        super().__init__()
        self._weights = {
            weight.untyped_storage().data_ptr(): weight for weight in model.parameters()
        }
        self.elements = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for x in tree_leaves((args, kwargs)):
            if (
                isinstance(x, torch.Tensor)
                and (at := x.untyped_storage().data_ptr()) in self._weights
            ):
                weight = self._weights[at]
                looked_up = func is torch.ops.aten.embedding.default
                read = args[1].numel() * weight.shape[1] if looked_up else weight.numel()
                self.elements[at] = max(read, self.elements.get(at, 0))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_kv_heads": 2, "mlp": "gelu"},
        {"attention_options": {"pattern": "dca", "window": 8}},
    ],
)
def test_its_bytes_are_those_of_the_weights_it_reads_and_of_the_cache(tied, more):
    kind = "sparse" if "attention_options" in more else "dense"
    overrides = TINY | {"tie_embeddings": tied} | more
    case = GenerationCase(
        "cpu", "x", "decoder_tiny", overrides, kind, 32, 2, "float32", "generation", new_tokens=2
    )
    model = case.build(0)
    prompt = torch.arange(64).view(2, 32)
    with torch.inference_mode():
        cache = model.new_cache(2, 32, 2)
        model.prefill(prompt, cache)
        with _Read(model) as read:
            model.decode(prompt[:, 0], cache)
    cached = (
        2 * case.config.num_layers * prompt.numel() * case.config.kv_heads * case.config.head_dim
    )
    assert case.formulas()["bytes"] == 4 * (sum(read.elements.values()) + cached)
