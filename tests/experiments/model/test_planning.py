"""What `nanolib.plan` and `nano plan` count, find, print and refuse."""

import json

import pytest

from nanolib.experiments.model.look import blocks_of
from nanolib.experiments.model.planner import Request, plan_use, uses_of
from nanolib.experiments.model.planning import plan
from nanolib.measurement import MemoryKind
from tests.experiments import own
from tests.experiments.own import checked
from tests.processes import invoked

SMALL = {"num_layers": 4, "d_model": 64, "num_heads": 4, "vocab_size": 128}
# A vocabulary of characters, into which no bytes of text fit, is planned all the same.
LLAMA = own.LLAMA | {"num_hidden_layers": 6, "vocab_size": 128}
HF, TINY = "hf:LlamaForCausalLM", "decoder_tiny"
CONTEXT = "max_position_embeddings"


@pytest.mark.parametrize(("model", "options"), [(TINY, SMALL), (HF, LLAMA)])
def test_a_use_has_the_plan_of_its_case_and_the_largest_batch_that_fits(model, options):
    options = options | {"context_length" if model == TINY else CONTEXT: 128}
    request = checked(model, 32, 4, options)
    uses = {use.name: use for use in uses_of(request)}
    for name, use in uses.items():
        assert use.breakdown == plan_use(request, name, 32, 4)
        assert [*use.batches] == [32, 128]
        for length, most in use.batches.items():
            peaks = [plan_use(request, name, length, batch).peak for batch in (most, most + 1)]
            assert peaks[0] <= request.memory < peaks[1]
    plan = own.case("training", model, options, (32, 4)).plan()
    assert uses["training"].breakdown.peak == plan.most


def test_a_plan_says_that_attention_computes_all_scores():
    small = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 128}
    shape = {"seq_len": 16, "batch_size": 2}
    for dropout, uses in ((0.1, "training; training, checkpointed"), (0, "")):
        options = small | {"attn_pdrop": dropout}
        text = str(plan("hf:GPT2LMHeadModel", "1GiB", **shape, options=options))
        assert (f"Attention computes all scores in {uses}. The reason is" in text) == bool(uses)


@pytest.mark.parametrize("vocab", [10_007, 20_014, 65_537])
def test_weights_do_not_grow_with_the_batch(vocab):
    options = LLAMA | {"vocab_size": vocab, "tie_word_embeddings": True}
    sizes = [plan_use(checked(HF, 16, batch, options), "inference", 16, batch) for batch in (1, 8)]
    one, eight = (found.bytes_by_kind[MemoryKind.WEIGHTS] for found in sizes)
    assert one == eight > 4 * vocab * LLAMA["hidden_size"]


def test_a_dtype_of_the_cache_changes_only_the_cache():
    whole, small = (
        plan_use(checked(TINY, 64, 2, SMALL, kv_dtype=name), "decoding", 64, 2).bytes_by_kind
        for name in (None, "float8_e4m3fn")
    )
    assert small == whole | {MemoryKind.CACHE: whole[MemoryKind.CACHE] / 4}
    # A key and a value of each head and token, and one token that the model generates.
    assert whole[MemoryKind.CACHE] == 4 * 2 * 4 * 64 * 64 * 2


def test_the_smaller_cache_after_the_first_token_of_windows_is_stated_by_its_closed_form():
    types = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
    options = own.LLAMA | types | {"head_dim": 16, CONTEXT: 64}
    shape = {"seq_len": 64, "batch_size": 2, "options": options}
    found = plan("hf:Gemma3ForCausalLM", "1GiB", kv_dtype="float16", **shape)
    a_token = 2 * 2 * (2 * 16) * 2  # keys and values · batch · heads · bytes
    assert found.uses[1].small_cache == a_token * (16 + 64)
    assert "After the first token, the cache of decoding shrinks to 20.0 KiB" in str(found)
    assert not any(use.small_cache for use in uses_of(checked(HF, 32, 2, own.LLAMA)))


def test_ranks_share_weights_gradients_and_states_out_and_gather_two_blocks():
    options = SMALL | {"context_length": 32}
    requests = [checked(TINY, 32, 4, options, ranks=ranks) for ranks in (1, 4)]
    alone, shared = (plan_use(request, "training", 32, 4) for request in requests)
    for kind in (MemoryKind.WEIGHTS, MemoryKind.STATES):
        assert shared.bytes_by_kind[kind] == pytest.approx(alone.bytes_by_kind[kind] / 4, rel=0.02)
    model = requests[0].case.build()
    block, whole = (sum(p.nbytes for p in m.parameters()) for m in (model.blocks[0], model))
    gathered = whole - SMALL["num_layers"] * block + 2 * block
    tables = sum(table.nbytes for table in model.buffers())  # of positions count as weights
    assert 0 <= shared.bytes_by_kind[MemoryKind.GATHERED] - gathered <= tables
    assert "4 ranks (FSDP, modelled)" in requests[1].title
    assert all(most % 4 == 0 for use in uses_of(requests[1]) for most in use.batches.values())


def test_a_list_of_a_config_leaves_equal_blocks_equal():
    types = {"layer_types": ["full_attention"] * 6, "head_dim": 16}
    for name, listed in ((HF, {"eos_token_id": [1, 2]}), ("hf:Qwen3ForCausalLM", types)):
        options = LLAMA | {"head_dim": 16}
        with_list, without = (
            checked(name, 32, 8, options | more, memory="1MiB", ranks=8) for more in (listed, {})
        )
        uses = uses_of(with_list)
        assert uses == uses_of(without) and not any(use.refused for use in uses)
        assert uses[2].remedy.endswith("or --ranks 16 --batch-size 16")
        assert blocks_of(with_list.case) == ("num_hidden_layers", 6)


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_a_config_file_of_transformers_is_planned_as_its_fields_are(tmp_path, dtype):
    path = tmp_path / "config.json"
    options = LLAMA | {"num_hidden_layers": 1, CONTEXT: 32}
    unused = {"model_type": "llama", "torch_dtype": "bfloat16", "transformers_version": "5.0.0"}
    known_to_others = {"n_ctx": 32, "ep_size": 1}
    fields = options | unused | known_to_others | {"architectures": ["LlamaForCausalLM"]}
    path.write_text(json.dumps(fields))
    shape, more = {"memory": "4MiB", "seq_len": 16}, {"num_hidden_layers": 2}
    found = plan(str(path), **shape, options=more, dtype=dtype)
    wanted = plan(HF, **shape, options=options | more, dtype=dtype or "bfloat16")
    assert found.uses == wanted.uses and found.title == wanted.title.replace(HF, str(path))
    notes = ["The file sets the dtype bfloat16; to plan another dtype, use --dtype"] * (not dtype)
    notes.append("The model does not read these fields of the file: ep_size, n_ctx")
    assert found.sentences == [*wanted.sentences, *notes]


def test_a_models_code_shows_why_it_fails_but_not_what_it_prints(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    code = "import torch\nprint('words')\ndef build(fails=False):\n    print('words')\n"
    code += (
        "    if fails:\n        raise SystemExit('never')\n    return torch.nn.Embedding(256, 8)"
    )
    (tmp_path / "talks.py").write_text(code)
    asked = "plan", "talks:build", "--memory", "1GiB", "--seq-len", "8"
    ended = invoked(*asked)
    assert ended.exit_code == 0 and "words" not in ended.output, ended.output
    ended = invoked(*asked, "-p", "fails=true")
    assert "'talks:build' cannot be planned, because SystemExit: never" in ended.output


def test_one_token_has_a_plan_of_inference_alone():
    refused = {use.name: use.refused for use in plan(TINY, "1GiB", seq_len=1, options=SMALL).uses}
    assert refused["decoding"] == "decoding needs a prompt; use a seq_len of 2 or more"
    assert not refused["inference"]


def test_the_next_step_is_a_batch_of_the_length_that_was_asked_or_ranks_that_share_the_peak():
    options = LLAMA | {CONTEXT: 512}
    asked = checked(HF, 128, 64, options, memory="16MiB")
    training = uses_of(asked)[2]
    assert training.batches[128] and training.batches[512]
    assert training.remedy.endswith(f"Next: use batch size {training.batches[128]} at 128 tokens")
    small = uses_of(checked(HF, 128, 64, options, memory="1MiB"))[2]
    ranks = -(-training.breakdown.peak // 2**20)
    assert small.remedy.endswith(f"or --ranks {ranks} --batch-size {ranks}")


SMALL_WORDS = "-p num_layers=4 -p d_model=64 -p num_heads=4 -p vocab_size=128"


def test_the_command_shows_what_fits_what_would_and_what_uses_the_memory(tmp_path):
    asked = f"{TINY} --memory 3MiB --seq-len 64 {SMALL_WORDS} --precision pure"
    ended = invoked("plan", *asked.split(), "--json", tmp_path / "f.json")
    assert ended.exit_code == 0, ended.output
    assert (
        "These uses fit: inference; decoding" in ended.output and "training needs " in ended.output
    )
    assert "training: the largest parts of the peak" in ended.output and "blocks.*" in ended.output
    _, _, batches = ended.output.partition("The largest batch that fits")
    rows = {line.split()[0]: line.split()[1:] for line in batches.splitlines()[2:5]}
    assert list(rows) == ["64", "256", "1024"] and rows["1024"][2:] == ["—", "—"]
    for use in json.loads((tmp_path / "f.json").read_text())["uses"]:
        assert sum(use["kinds"].values()) == sum(p["bytes"] for p in use["parts"]) == use["bytes"]
    ended = invoked("plan", TINY, "--memory", "1KiB", *SMALL_WORDS.split())
    assert ended.exit_code == 1 and "No use fits" in ended.output
    assert "Next: use a smaller --seq-len" in ended.output


def test_training_is_mixed_unless_a_dtype_is_given():
    mixed = Request(model=TINY, memory="1GiB", kv_dtype="float16").title
    assert mixed.startswith("float32, training in mixed precision, cache in float16, 1 ×")
    assert Request(model=TINY, memory="1GiB", dtype="bfloat16").title.startswith("bfloat16, 1 ×")
