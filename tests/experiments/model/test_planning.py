import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nanolib
from nanolib.experiments.model.planner import USES, Planner, largest
from nanolib.experiments.model.planning import memory_bytes, plan
from nanolib.measurement import BadInput, MemoryKind
from nanolib.meters.memory import LiveBytes
from nanolib.models.transformer import next_token_loss
from nanolib.models.user import logits_of
from tests.experiments import own
from tests.experiments.own import checked

SMALL = {"num_layers": 4, "d_model": 64, "num_heads": 4, "vocab_size": 128}
LLAMA = own.LLAMA | {"num_hidden_layers": 6, "vocab_size": 256}


def test_amounts_of_memory_are_read():
    assert (
        memory_bytes("80GiB") == 80 * 2**30
        and memory_bytes("24 GB") == 24 * 10**9
        and memory_bytes(5) == 5
    )
    assert memory_bytes("1.5MiB") == 3 * 2**19
    for wrong in ("80 parsec", "many", "-3GiB", "0GiB", "1e9", "GiB", ""):
        with pytest.raises(BadInput, match=r"memory: .* is not an amount; use one such as 80GiB"):
            memory_bytes(wrong)


@given(
    *(
        st.integers(0, 1000),
        st.integers(1, 50),
        st.integers(0, 3),
        st.integers(1, 5000),
        st.integers(1, 40),
    ),
    *(st.integers(0, 60), st.integers(0, 500)),
)
def test_the_largest_that_fits_fits_and_the_next_does_not(
    fixed, slope, bend, memory, start, kink, more
):
    asked = []

    def need(n):
        asked.append(n)
        return fixed + slope * n + bend * n * n + more * max(0, n - kink)

    found = largest(need, memory, start, 60)
    assert len(asked) <= 20
    assert found == max((n for n in range(1, 61) if need(n) <= memory), default=0)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param("decoder_tiny", SMALL, marks=pytest.mark.thorough),
        ("hf:LlamaForCausalLM", LLAMA | {"max_position_embeddings": 512}),
    ],
)
def test_what_it_names_fits_by_plan_and_the_next_does_not(model, options):
    planner, memory = Planner(checked(model, 32, 4, options)), 20 * 2**20
    contexts = [32, 256, 1024] if model == "decoder_tiny" else [32, 128, 512]
    for name in USES if model == "decoder_tiny" else ("training",):
        use = planner.use(name)
        assert use.breakdown.peak == sum(use.breakdown.parts.values())
        assert use.fits == (use.breakdown.peak <= memory) and [*use.batches] == contexts
        for length, most in use.batches.items():
            assert not most or planner.breakdown(name, most, length).peak <= memory
            assert planner.breakdown(name, most + 1, length).peak > memory


@pytest.mark.parametrize(
    "options",
    [
        LLAMA | {"num_hidden_layers": 5, "tie_word_embeddings": True},
        pytest.param(LLAMA, marks=pytest.mark.thorough),
    ],
)
def test_a_stack_of_equal_blocks_is_planned_from_two_low_ones_as_it_would_be_whole(options):
    low, whole = (Planner(checked("hf:LlamaForCausalLM", 16, 2, options)) for _ in range(2))
    assert low.stack[1] == options["num_hidden_layers"]
    whole.__dict__["stack"] = "", 0
    for name in USES:
        assert low.breakdown(name, 2, 16).parts == whole.breakdown(name, 2, 16).parts


def test_blocks_that_differ_are_planned_one_by_one():
    request = checked("hf:Gemma2ForCausalLM", 16, 2, LLAMA | {"head_dim": 16})
    assert Planner(request).stack[1] == 0  # every second one sees a window alone


def test_ranks_share_weights_gradients_and_states_out_and_gather_two_blocks():
    requests = [
        checked("decoder_tiny", 32, 4, SMALL | {"context_length": 32}, ranks=ranks)
        for ranks in (1, 4)
    ]
    alone, shared = (Planner(request).breakdown("training", 4, 32) for request in requests)
    for kind in (MemoryKind.WEIGHTS, MemoryKind.STATES):
        assert shared.by_kind[kind] == pytest.approx(alone.by_kind[kind] / 4, rel=0.02)
    model = requests[0].case.build()
    block, whole = (sum(p.nbytes for p in m.parameters()) for m in (model.blocks[0], model))
    gathered = whole - SMALL["num_layers"] * block + 2 * block
    tables = sum(table.nbytes for table in model.buffers())  # of positions count as weights
    assert 0 <= shared.by_kind[MemoryKind.GATHERED] - gathered <= tables
    found = plan("decoder_tiny", "8MiB", seq_len=32, batch_size=4, ranks=4, options=SMALL)
    assert "4 ranks (FSDP, modelled)" in found.title
    assert all(most % 4 == 0 for use in found.uses for most in use.batches.values())


@pytest.mark.parametrize("model", ["decoder_tiny", "hf:LlamaForCausalLM"])
def test_a_vocabulary_of_characters_is_planned_though_no_bytes_of_text_fit_into_it(model):
    options = (LLAMA if ":" in model else SMALL) | {"vocab_size": 65}
    assert Planner(checked(model, 16, 2, options)).use("inference").fits


def test_checkpointing_keeps_less_and_sgd_has_no_states():
    planner = Planner(checked("decoder_tiny", 64, 8, SMALL, optimizer="sgd"))
    training, checkpointed = (planner.breakdown(name, 8, 64).by_kind for name in list(USES)[2:])
    assert (
        checkpointed[MemoryKind.SAVED] < training[MemoryKind.SAVED]
        and MemoryKind.STATES not in training
    )


@pytest.mark.parametrize(
    ("model", "options"), [("decoder_tiny", SMALL), ("hf:LlamaForCausalLM", LLAMA)]
)
def test_a_mixed_plan_is_the_peak_of_a_real_step_under_autocast(model, options):
    request = checked(model, 64, 4, options, precision=None)
    planned = Planner(request).breakdown("training", 4, 64)
    built, ids = request.case.build(0), torch.randint(128, (4, 65))
    optimizer = torch.optim.AdamW(built.parameters(), fused=True)

    @torch.autocast("cpu", torch.bfloat16)
    def forward(ids):
        return logits_of(built)(ids)

    def step():
        next_token_loss(forward, ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    states = [x for state in optimizer.state.values() for x in state.values()]
    with LiveBytes() as counter:
        counter.watch(*built.parameters(), *built.buffers(), *states, ids)
        step()
    assert planned.peak == pytest.approx(counter.peak, rel=0.05)
    weights = sum(weight.nbytes for weight in built.parameters())  # float32, as two states are
    assert planned.by_kind[MemoryKind.STATES] == pytest.approx(2 * weights, rel=0.001)


def test_a_model_that_takes_too_long_is_not_planned_and_its_other_uses_are_not_tried():
    counted = []

    def count(*of):
        counted.append(of)
        raise TimeoutError("it takes over 60 s on tensors without data")

    planner = Planner(checked("decoder_tiny", 16, 1, SMALL))
    planner.breakdown = count
    for name in ("inference", "training"):
        assert planner.use(name).refused.endswith("on tensors without data; lower seq_len")
    assert len(counted) == 1


def test_it_is_public_and_says_what_is_missing():
    found = nanolib.plan("decoder_tiny", "1MiB", seq_len=32, options=SMALL)
    assert "nothing fits as it is" in str(
        found
    ) and "a smaller model, or more ranks, each with a sequence" in str(found)
    assert json.dumps(found.to_dict())


def test_a_config_file_of_transformers_is_planned_as_its_fields_are(tmp_path):
    path, options = tmp_path / "config.json", LLAMA | {"num_hidden_layers": 1}
    unused = {"model_type": "llama", "torch_dtype": "bfloat16", "transformers_version": "5.0.0"}
    path.write_text(json.dumps(options | unused | {"architectures": ["LlamaForCausalLM"]}))
    shape = {"memory": "1GiB", "seq_len": 16}
    more = {"num_hidden_layers": 2}
    found = plan(str(path), **shape, options=more)
    wanted = plan("hf:LlamaForCausalLM", **shape, options=options | more)
    assert [use.breakdown for use in found.uses] == [use.breakdown for use in wanted.uses] and str(
        path
    ) in found.title


OWN = """
import torch
class Short(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.at, self.out = torch.nn.Embedding(300, 8), torch.nn.Embedding(100, 8), torch.nn.Linear(8, 300)
    def forward(self, ids):
        assert ids.shape[1] <= 100 and ids.shape[0] <= 9
        return self.out(self.embed(ids) + self.at(torch.arange(ids.shape[1], device=ids.device)))
"""


def test_where_a_model_of_ones_own_ends_the_search_ends(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "limited.py").write_text(OWN)
    inference, _, training, _ = plan("limited:Short", "80GiB", seq_len=16).uses
    assert inference.batches == training.batches == {4: 9, 16: 9}


@pytest.mark.thorough
def test_what_was_not_tried_is_said():
    found = plan(
        "decoder_tiny",
        "640GiB",
        seq_len=64,
        attention_type="sparse",
        options=SMALL | {"num_layers": 1},
    )
    assert found.batches().set_index("context").loc[64, "inference"] == "65536+"
