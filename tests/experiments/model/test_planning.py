"""What `nanolib.plan` and `nano plan` count, find, print and refuse."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nanolib
from nanolib.experiments.model import planner
from nanolib.experiments.model.case import ModelCase
from nanolib.experiments.model.planner import USES, Planner, largest
from nanolib.experiments.model.planning import Request, plan
from nanolib.measurement import BadInput, MemoryKind
from nanolib.meters.memory import LiveBytes
from nanolib.models.training import next_token_loss
from nanolib.models.user import logits_of
from tests.experiments import own
from tests.experiments.own import checked
from tests.processes import invoked

SMALL = {"num_layers": 4, "d_model": 64, "num_heads": 4, "vocab_size": 128}
# A vocabulary of characters, into which no bytes of text fit, is planned all the same.
LLAMA = own.LLAMA | {"num_hidden_layers": 6, "vocab_size": 128}
HF, TINY = "hf:LlamaForCausalLM", "decoder_tiny"
MODELS = [(TINY, SMALL), (HF, LLAMA)]


_ENDS = ((0, 1000), (1, 50), (0, 3), (1, 5000), (1, 40), (0, 60), (0, 500))


@given(*(st.integers(*ends) for ends in _ENDS))
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


@pytest.mark.parametrize(("model", "options"), MODELS)
def test_each_batch_and_length_follows_to_the_byte_from_calls_that_are_followed_once(
    model, options, monkeypatch
):
    followed = []

    class Counting(planner.StackMemory):
        def __init__(self, depth, *ats):
            followed.append(len(ats))
            super().__init__(depth, *ats)

    monkeypatch.setattr(planner, "StackMemory", Counting)
    context = "context_length" if model == TINY else "max_position_embeddings"
    options, names = options | {context: 128}, ("inference", "training")
    plans = Planner(checked(model, 32, 4, options))
    for name in names:
        plans.use(name)
    assert sum(followed) == 2 * len(names)  # two lengths of each use
    kind = "dense" if model == TINY else "own"
    for name, batch, length in (("inference", 700, 128), ("training", 1, 32), ("training", 5, 64)):
        case = ModelCase("cpu", "m", model, options, kind, length, batch, "float32", USES[name][0])
        assert plans.breakdown(name, batch, length).peak == case.plan().most


def test_a_stack_of_equal_blocks_is_planned_from_two_low_ones_as_it_would_be_whole():
    options = LLAMA | {"num_hidden_layers": 5, "tie_word_embeddings": True}
    low, whole = (Planner(checked(HF, 16, 2, options)) for _ in range(2))
    assert low.stack[1] == options["num_hidden_layers"]
    whole.__dict__["stack"] = "", 0
    for name in USES:
        assert low.breakdown(name, 2, 16).parts == whole.breakdown(name, 2, 16).parts


def test_ranks_share_weights_gradients_and_states_out_and_gather_two_blocks():
    options = SMALL | {"context_length": 32}
    requests = [checked(TINY, 32, 4, options, ranks=ranks) for ranks in (1, 4)]
    alone, shared = (Planner(request).breakdown("training", 4, 32) for request in requests)
    for kind in (MemoryKind.WEIGHTS, MemoryKind.STATES):
        assert shared.by_kind[kind] == pytest.approx(alone.by_kind[kind] / 4, rel=0.02)
    model = requests[0].case.build()
    block, whole = (sum(p.nbytes for p in m.parameters()) for m in (model.blocks[0], model))
    gathered = whole - SMALL["num_layers"] * block + 2 * block
    tables = sum(table.nbytes for table in model.buffers())  # of positions count as weights
    assert 0 <= shared.by_kind[MemoryKind.GATHERED] - gathered <= tables
    assert "4 ranks (FSDP, modelled)" in requests[1].title
    assert all(most % 4 == 0 for most in Planner(requests[1]).use("training").batches.values())


@pytest.mark.parametrize(("model", "options"), MODELS)
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

    planner = Planner(checked(TINY, 16, 1, SMALL))
    planner.breakdown = count
    for name in ("inference", "training"):
        assert planner.use(name).refused.endswith("on tensors without data; lower seq_len")
    assert len(counted) == 1


def test_a_config_file_of_transformers_is_planned_as_its_fields_are(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    options = LLAMA | {"num_hidden_layers": 1, "max_position_embeddings": 32}
    unused = {"model_type": "llama", "torch_dtype": "bfloat16", "transformers_version": "5.0.0"}
    known_to_others = {"n_ctx": 32, "ep_size": 1}
    fields = options | unused | known_to_others | {"architectures": ["LlamaForCausalLM"]}
    path.write_text(json.dumps(fields))
    monkeypatch.setattr(Planner, "_batches", lambda *_: iter(()))  # the search takes a minute
    shape, more = {"memory": "4MiB", "seq_len": 16}, {"num_hidden_layers": 2}
    found = plan(str(path), **shape, options=more)
    wanted = plan(HF, **shape, options=options | more)
    assert [use.breakdown for use in found.uses] == [use.breakdown for use in wanted.uses]
    assert str(path) in found.title
    assert found.sentences[-1] == "The model does not read these fields of the file: ep_size, n_ctx"
    assert not any("fields of the file" in sentence for sentence in wanted.sentences)


def test_one_token_has_no_token_to_decode_or_to_learn():
    found = nanolib.plan(TINY, "1GiB", seq_len=1, options=SMALL)
    refused = {use.name: use.refused for use in found.uses}
    assert not refused.pop("inference")
    assert set(refused.values()) == {"it needs at least two tokens; raise seq_len"}


OWN = """
import torch
class Short(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.at, self.out = torch.nn.Embedding(300, 8), torch.nn.Embedding(100, 8), torch.nn.Linear(8, 300)
    def forward(self, ids):
        assert ids.shape[1] <= 100 and ids.shape[0] <= 9
        return self.out(self.embed(ids) + self.at(torch.arange(ids.shape[1], device=ids.device)))
class Fails(Short):
    def forward(self, ids):
        assert not self.out.weight.numel(), "never"
"""


def test_where_a_model_of_ones_own_ends_the_search_ends(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "limited.py").write_text(OWN)
    inference, _, training, _ = plan("limited:Short", "80GiB", seq_len=16).uses
    assert inference.batches == training.batches == {4: 9, 16: 9}
    with pytest.raises(
        BadInput, match=r"'limited:Fails' cannot be .*, because AssertionError: nev"
    ):
        plan("limited:Fails", "80GiB")


SMALL_WORDS = "-p num_layers=4 -p d_model=64 -p num_heads=4 -p vocab_size=128"


def test_the_command_shows_what_fits_what_would_and_what_uses_the_memory(tmp_path):
    asked = f"{TINY} --memory 3MiB --seq-len 64 {SMALL_WORDS} --precision pure --optimizer sgd"
    ended = invoked("plan", *asked.split(), "--json", tmp_path / "f.json")
    assert ended.exit_code == 0, ended.output
    assert (
        "These uses fit: inference; decoding" in ended.output and "training needs " in ended.output
    )
    assert "training: the largest parts of the peak" in ended.output and "blocks.*" in ended.output
    _, _, batches = ended.output.partition("The largest batch that fits")
    rows = {line.split()[0]: line.split()[1:] for line in batches.splitlines()[2:5]}
    assert list(rows) == ["64", "256", "1024"] and rows["1024"][2:] == ["—", "—"]
    found = json.loads((tmp_path / "f.json").read_text())
    assert [use["use"] for use in found["uses"]] == list(USES)
    for use in found["uses"]:
        assert sum(use["kinds"].values()) == sum(p["bytes"] for p in use["parts"]) == use["bytes"]
    training, checkpointed = (use["kinds"] for use in found["uses"][2:])
    assert checkpointed[MemoryKind.SAVED] < training[MemoryKind.SAVED]
    assert MemoryKind.STATES not in training
    ended = invoked("plan", TINY, "--memory", "1KiB", *SMALL_WORDS.split())
    assert ended.exit_code == 1 and "No use fits" in ended.output
    assert "a smaller model, or more ranks with a sequence each" in ended.output


def test_training_is_mixed_unless_a_dtype_is_given():
    mixed = Request(model=TINY, memory="1GiB", kv_dtype="float16").title
    assert mixed.startswith("float32, training in mixed precision, keys and values in float16, 1 ×")
    assert Request(model=TINY, memory="1GiB", dtype="bfloat16").title.startswith("bfloat16, 1 ×")
