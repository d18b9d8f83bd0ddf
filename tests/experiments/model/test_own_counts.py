"""What is counted of one's own model: a token's work and traffic, a plan, experts, windows."""

import pytest

from nanolib.experiments.model import cases as model
from nanolib.experiments.model.look import look_at_code
from nanolib.meters.flops import model_flops
from tests.experiments.own import LLAMA, case
from tests.measuring import timed_alone

LAYERS, D, HEADS, KV_HEADS, FF, VOCAB = 3, 64, 4, 2, 96, 300
HEAD_DIM, KV = D // HEADS, KV_HEADS * D // HEADS
HF = LLAMA | {"num_hidden_layers": LAYERS, "vocab_size": VOCAB, "max_position_embeddings": 2048}
OWN = """
import torch
from nanolib import NanoConfig, create_model
def build(**options):
    return create_model(NanoConfig(mlp="swiglu", **options))
def partly_frozen(frozen):
    body = [torch.nn.Embedding(256, 32), torch.nn.Linear(32, 32, bias=False)]
    body = torch.nn.Sequential(*body).requires_grad_(not frozen)
    return torch.nn.Sequential(body, torch.nn.Linear(32, 256, bias=False))
"""
MINE = {"d_model": D, "d_ff": FF, "num_layers": LAYERS, "num_heads": HEADS, "vocab_size": VOCAB}
MINE |= {"num_kv_heads": KV_HEADS, "context_length": 2048, "tie_embeddings": False}
EXPERTS = HF | {"num_local_experts": 8, "num_experts_per_tok": 2}
MISTRAL, MIXTRAL = "hf:MistralForCausalLM", "hf:MixtralForCausalLM"
LINEAR = D * D + 2 * D * KV + D * D + 3 * D * FF  # weights of a block's products
NORMS = (2 * LAYERS + 1) * D
PER_PAIR = LAYERS * 4 * HEADS * HEAD_DIM  # FLOPs of a query and a key


@pytest.fixture(autouse=True)
def _mine(tmp_path, monkeypatch):
    (tmp_path / "mine_for_counts.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("model", "options", "n", "batch", "seen"),
    [
        ("hf:LlamaForCausalLM", HF, 200, 3, 201),  # the prompt and itself
        ("mine_for_counts:build", MINE, 200, 3, 201),
        (MISTRAL, HF | {"sliding_window": 16}, 40, 1, 16),
    ],
)
def test_one_tokens_flops_and_bytes_are_those_of_a_closed_form(model, options, n, batch, seen):
    asked = case("generation", model, options, (n, batch))
    said = asked.formulas()
    assert said["flops"] == batch * (LAYERS * 2 * LINEAR + PER_PAIR * seen + 2 * D * VOCAB)
    cache = 2 * LAYERS * batch * (seen - 1) * KV
    assert said["bytes"] == 4 * (LAYERS * LINEAR + D * VOCAB + NORMS + batch * D + cache)
    assert asked.plan().peaks


@pytest.mark.parametrize(("mode", "passes"), [("inference", 1), ("training", 3)])
def test_a_sliding_window_counts_its_pairs_by_a_run_that_has_the_masks_data(mode, passes):
    n, window = 40, 16
    asked = case(mode, MISTRAL, HF | {"sliding_window": window}, (n, 1))
    linear = LAYERS * 2 * n * LINEAR + 2 * n * D * VOCAB
    whole = passes * (linear + PER_PAIR * n * n)
    assert asked.formulas()["flops"] == whole  # an upper bound
    kept = sum(min(i + 1, window) for i in range(n))
    assert asked.count_work(run=True).flops == passes * (linear + PER_PAIR * kept)
    assert asked.count_work().count.full == whole


def test_a_checkpointed_step_has_the_models_flops_and_the_computed_ones():
    n, d, layers = 16, 32, 2
    sizes = {"d_model": d, "d_ff": 64, "num_layers": layers, "num_heads": 2, "vocab_size": 300}
    found = case(overrides=sizes, shape=(n, 1), optimization="checkpoint")
    rows = timed_alone(found.measure(model.Params(device="cpu", budget_s=0.01), {}))
    flops = {row.method: row.estimate for row in rows if row.metric == "flops"}
    parts = model_flops(found.config, 1, n, n * (n + 1) // 2)
    # a block is computed again up to its last product, which its gradient does not need
    again = parts["total"] - parts["head"] - layers * 2 * n * 64 * d
    assert flops == {"kept": 3 * parts["total"], "computed": 3 * parts["total"] + again}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_experts_count(dtype):
    n = 64
    asked = case("training", MIXTRAL, EXPERTS, (n, 1), dtype=dtype)
    attention = LAYERS * 2 * n * (2 * D * D + 2 * D * KV) + PER_PAIR * n * (n + 1) // 2
    experts = LAYERS * 2 * n * (D * 8 + 2 * 3 * D * FF)
    assert asked.formulas()["flops"] == 3 * (attention + experts + 2 * n * D * VOCAB)


@pytest.mark.parametrize(("batch", "experts"), [(1, 2), (4, 8)])
def test_a_token_reads_the_experts_that_it_can_choose(batch, experts):
    asked = case("generation", MIXTRAL, EXPERTS, (32, batch), dtype="bfloat16")
    block = 2 * D * D + 2 * D * KV + D * 8 + experts * 3 * D * FF
    rest = batch * (D + 2 * LAYERS * 32 * KV)
    assert asked.formulas()["bytes"] == 2 * (LAYERS * block + D * VOCAB + NORMS + rest)


def test_weights_that_do_not_learn_have_neither_a_backward_pass_nor_states():
    n, body, head, model = 16, 32 * 32, 32 * 256, "mine_for_counts:partly_frozen"
    learns, frozen = (
        case("training", model, {"frozen": frozen}, (n, 1)) for frozen in (False, True)
    )
    look_at_code(model, [learns.planned_as, frozen.planned_as])  # both in one process
    for asked, flops, learning in (
        (learns, 6 * (body + head), 256 * 32 + body + head),
        (frozen, 2 * body + 4 * head, head),
    ):
        said = asked.formulas()
        assert said["flops"] == n * flops
        assert said["bytes"] == 4 * (2 * said["parameters"] + 8 * learning)
