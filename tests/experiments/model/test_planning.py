import json
import subprocess
import sys

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import nanolib
from nanolib.cli import main
from nanolib.experiments.model.planner import USES, Planner, largest
from nanolib.experiments.model.planning import memory_bytes, plan
from nanolib.measurement import BadInput, MemoryKind
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
    for wrong in ("80gib", "many", "-3GiB", "0GiB", "1e9", "GiB", ""):
        with pytest.raises(BadInput, match=r"memory: .* is no amount; give one such as 80GiB"):
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
    memory = 20 * 2**20
    planner = Planner(checked(model, 32, 4, dict(options)), "adamw", 1)
    for name in USES if model == "decoder_tiny" else ("training",):
        use = planner.use(name, memory)
        assert use.breakdown.peak == sum(use.breakdown.parts.values())
        assert use.fits == (use.breakdown.peak <= memory)
        assert planner.breakdown(name, use.largest_batch, 32).peak <= memory
        assert planner.breakdown(name, use.largest_batch + 1, 32).peak > memory
        assert planner.breakdown(name, 4, use.longest).peak <= memory
        assert use.longest == 512 or planner.breakdown(name, 4, use.longest + 1).peak > memory


@pytest.mark.parametrize(
    "options",
    [
        LLAMA | {"num_hidden_layers": 5, "tie_word_embeddings": True},
        pytest.param(LLAMA, marks=pytest.mark.thorough),
    ],
)
def test_a_stack_of_equal_blocks_is_planned_from_two_low_ones_as_it_would_be_whole(options):
    source = checked("hf:LlamaForCausalLM", 16, 2, dict(options))
    low = Planner(source, "adamw", 1)
    assert low.stack[1] == options["num_hidden_layers"]
    whole = Planner(source, "adamw", 1)
    whole.__dict__["stack"] = "", 0
    for name in USES:
        assert low.breakdown(name, 2, 16).parts == whole.breakdown(name, 2, 16).parts


def test_blocks_that_differ_are_planned_one_by_one():
    source = checked("hf:Gemma2ForCausalLM", 16, 2, LLAMA | {"head_dim": 16})
    assert Planner(source).stack[1] == 0  # every second one sees a window alone


def test_ranks_share_weights_gradients_and_states_out_and_gather_two_blocks():
    source = checked("decoder_tiny", 32, 4, SMALL | {"context_length": 32})
    alone, shared = (
        Planner(source, "adamw", ranks).breakdown("training", 4, 32) for ranks in (1, 4)
    )
    for kind in (MemoryKind.WEIGHTS, MemoryKind.STATES):
        assert shared.by_kind[kind] == pytest.approx(alone.by_kind[kind] / 4, rel=0.02)
    model = source.build()
    block, whole = (sum(p.nbytes for p in m.parameters()) for m in (model.blocks[0], model))
    gathered = whole - SMALL["num_layers"] * block + 2 * block
    tables = sum(table.nbytes for table in model.buffers())  # of positions count as weights
    assert 0 <= shared.by_kind[MemoryKind.GATHERED] - gathered <= tables
    found = plan("decoder_tiny", "8MiB", seq_len=32, batch_size=4, ranks=4, options=SMALL)
    assert "4 ranks (FSDP, modelled)" in found.title
    assert all(use.largest_batch % 4 == 0 for use in found.uses)


@pytest.mark.parametrize("model", ["decoder_tiny", "hf:LlamaForCausalLM"])
def test_a_vocabulary_of_characters_is_planned_though_no_bytes_of_text_fit_into_it(model):
    options = (LLAMA if ":" in model else SMALL) | {"vocab_size": 65}
    source = checked(model, 16, 2, options)
    assert source.overrides["vocab_size"] == 65
    assert Planner(source).use("inference", 2**30).fits


def test_checkpointing_keeps_less_and_sgd_has_no_states():
    planner = Planner(checked("decoder_tiny", 64, 8, SMALL), "sgd", 1)
    training, checkpointed = (planner.breakdown(name, 8, 64).by_kind for name in list(USES)[2:])
    assert (
        checkpointed[MemoryKind.SAVED] < training[MemoryKind.SAVED]
        and MemoryKind.STATES not in training
    )


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
    assert found.uses == wanted.uses and str(path) in found.title


OWN = """
import torch
class Fails(torch.nn.Linear):
    def forward(self, ids):
        assert not self.weight.numel(), "never"
class Short(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.at, self.out = torch.nn.Embedding(300, 8), torch.nn.Embedding(100, 8), torch.nn.Linear(8, 300)
    def forward(self, ids):
        assert ids.shape[1] <= 100 and ids.shape[0] <= 9
        return self.out(self.embed(ids) + self.at(torch.arange(ids.shape[1], device=ids.device)))
def fails():
    return Fails(2, 2)
def short():
    return Short()
"""


def test_where_a_model_of_ones_own_ends_the_search_ends(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "limited.py").write_text(OWN)
    inference, _, training, _ = plan("limited:short", "80GiB", seq_len=16).uses
    assert (
        (inference.largest_batch, inference.longest)
        == (training.largest_batch, training.longest)
        == (9, 100)
    )


@pytest.mark.thorough
def test_what_was_not_tried_is_said():
    found = plan(
        "decoder_tiny",
        "640GiB",
        seq_len=64,
        attention_type="sparse",
        options=SMALL | {"num_layers": 1},
    )
    assert {use.longest for use in found.uses} == {2**17}
    table = found.table().set_index("")
    assert set(table.loc["longest"]) == {"131072+"}
    assert table.loc["largest batch", "inference"] == "65536+"


@pytest.mark.parametrize(
    "wrong",
    [{"model": 5}, {"batch_size": "four"}, {"seq_len": 1.5}, {"optimizer": []}, {"ranks": None}],
)
def test_what_is_no_number_or_name_is_told(wrong):
    with pytest.raises(BadInput, match=f"^{next(iter(wrong))}: "):
        plan(**{"model": "decoder_tiny", "memory": "1GiB"} | wrong)


BAD = [
    (["nope"], "model: 'nope' is no preset"),
    (["decoder_tiny", "--memory", "5parsec"], "memory: '5parsec' is no amount"),
    (
        ["decoder_tiny", "--ranks", "3", "--batch-size", "4"],
        "ranks: 3 does not divide batch_size 4",
    ),
    (["decoder_tiny", "--dtype", "int3"], "dtype: 'int3' is no dtype"),
    (["decoder_tiny", "--seq-len", "0"], "seq_len: Input should be greater than 0, got 0"),
    (
        ["decoder_tiny", "--optimizer", "lion"],
        "optimizer: Input should be 'adamw', 'sgd' or 'momentum', got 'lion'",
    ),
    (
        ["decoder_tiny", "--attention-type", "flex"],
        "cannot be planned: a compiled kernel allocates out of the counter's sight",
    ),
    (["decoder_tiny", "--attention-type", "odd"], "attention_type: 'odd' is not an attention kind"),
    (
        ["decoder_tiny", "-p", "d_model=x"],
        "d_model: Input should be a valid integer",
    ),
    (["decoder_tiny", "-p", "dtype=bfloat16"], "options: dtype is none of them; give --dtype"),
    (
        ["hf:LlamaForCausalLM", "-p", "attention_type=x"],
        "options: attention_type is none of them; give --attention-type",
    ),
    (
        ["hf:LlamaForCausalLM", "--attention-type", "sparse"],
        "attention_type: hf:LlamaForCausalLM has its own; leave it out",
    ),
    (["decoder_tiny", "-p", "name=x"], "name: unknown name"),
    (
        ["decoder_tiny", "-p", "context_length=64", "--seq-len", "128"],
        "seq_len: 128 exceeds the context_length 64",
    ),
    (
        ["hf:LlamaForCausalLM", "--seq-len", "9999"],
        "shorten it or raise max_position_embeddings to 9999",
    ),
    (["decoder_tiny", "--seq-len", "9" * 20], "nano: seq_len: "),
    (
        ["decoder_tiny", "--seq-len", "200000", "--attention-type", "sparse"],
        "seq_len: 200000 is planned with dense",
    ),
    (["decoder_tiny", "--memory", f"{'9' * 400}GiB"], "is no amount; give one such as 80GiB"),
    (
        ["hf:Gemma2ForCausalLM", "--ranks", "2", "--batch-size", "2"],
        "ranks: FSDP gathers equal blocks, which hf:Gemma2ForCausalLM",
    ),
    (["hf:LlamaForCausalLM", "-p", "num_hidden_layers=-1"], "makes no model; give 1 or more"),
    (
        ["hf:LlamaForCausalLM", "-p", "attn_implementation=flex_attention"],
        "cannot be planned; use sdpa or eager",
    ),
    (["nowhere.json"], "model: 'nowhere.json' is no config file of transformers (FileNotFound"),
    (["own:fails"], "model: 'own:fails' cannot be planned: AssertionError: never"),
    (["hf:Nope"], "transformers has no model class 'Nope'"),
    (["hf:LlamaForCausalLM", "-p", "foo=1"], "'foo' is not a field of LlamaConfig"),
    (["mymodule:build"], "there is no module 'mymodule'"),
    (["decoder_tiny", "--json", "nowhere/f.json"], "nowhere is not a folder"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD)
def test_bad_input_is_one_line(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    given_memory = [] if "--memory" in arguments else ["--memory", "1GiB"]
    ended = CliRunner().invoke(main, ["plan", *arguments, *given_memory])
    assert ended.exit_code == 2 and said in ended.output, ended.output
    assert len(ended.output.strip().splitlines()) == 1


def test_the_command_shows_what_fits_and_who_holds_it(tmp_path):
    small = [text for name, value in SMALL.items() for text in ("-p", f"{name}={value}")]
    asked = [
        "plan",
        "decoder_tiny",
        "--memory",
        "3MiB",
        "--seq-len",
        "64",
        *small,
        "--json",
        str(tmp_path / "f.json"),
    ]
    ended = CliRunner().invoke(main, asked)
    assert ended.exit_code == 0, ended.output
    assert "fits: inference; decoding" in ended.output and "training needs " in ended.output
    assert "training: the largest parts of the peak" in ended.output and "blocks.*" in ended.output
    found = json.loads((tmp_path / "f.json").read_text())
    assert [use["use"] for use in found["uses"]] == list(USES)
    for use in found["uses"]:
        assert (
            sum(use["kinds"].values())
            == sum(part["bytes"] for part in use["parts"])
            == use["bytes"]
        )
    ended = CliRunner().invoke(main, ["plan", "decoder_tiny", "--memory", "1KiB", *small])
    assert ended.exit_code == 1 and "nothing fits as it is" in ended.output


RUN = """
import resource, sys, torch
from nanolib.config import NanoConfig
from nanolib.models import create_model
batch, memory = map(int, sys.argv[1:])
torch.set_num_threads(1)
torch.randn(64, 64) @ torch.randn(64, 64)
def used():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) * 1024
begun = used()
config = NanoConfig.from_preset("decoder_tiny", num_layers=2)
model = create_model(config).eval()
resource.setrlimit(resource.RLIMIT_DATA, (begun + memory,) * 2)
try:
    with torch.no_grad():
        model(torch.zeros(batch, 1024, dtype=torch.int64))
except RuntimeError as error:
    sys.exit(3 if "allocate memory" in str(error) else str(error))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit on memory is Linux's")
def test_the_largest_batch_runs_under_that_limit_and_the_next_does_not():
    planner = Planner(checked("decoder_tiny", 1024, 4, {"num_layers": 2}), "adamw", 1)
    memory = planner.breakdown("inference", 4, 1024).peak
    assert planner.use("inference", memory).largest_batch == 4
    own = 128 * 2**20  # of the process and its allocator; one sequence more needs 198 MiB

    def ended(sequences):
        command = [sys.executable, "-c", RUN, str(sequences), str(memory + own)]
        return subprocess.run(command, timeout=120, check=False).returncode

    assert (ended(4), ended(5)) == (0, 3)
