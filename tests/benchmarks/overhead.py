"""What profiling costs, per mode and component: interleaved calls with and without; bytes per token; peers: `make bench`.

    python tests/benchmarks/overhead.py [--minutes 6] [--preset decoder_small] [--layers N]

Goals, of the interval's upper end on decoder_small: minimal < 1 %, standard < 3 %, deep < 8 %.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from nanolib import NanoConfig, create_model
from nanolib.meters.energy.meter import EnergyMeter
from nanolib.meters.layers.overhead import Overhead, measure_overhead
from nanolib.meters.layers.profiler import LayerProfiler
from nanolib.meters.layers.profiling import MODES, ProfilingConfig
from nanolib.models.generation import Generation
from nanolib.stats.compare import compare_paired
from nanolib.store import Run, Store

GOALS = {"minimal": 0.01, "standard": 0.03, "deep": 0.08}
COMPONENTS = {
    "block timing": ProfilingConfig.minimal(),
    "every module": ProfilingConfig(modules=True, every_kth_token=1),
    "activations": ProfilingConfig(modules=True, capture_activations=True, every_kth_token=1),
    "deep pass": replace(ProfilingConfig.deep(), every_kth_token=1),
}
PEER_ROUNDS = 12
BYTES = {"minimal": 1024, "standard": 5 * 1024, "deep": 20 * 1024}


@contextlib.contextmanager
def _trace():
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "traces.sqlite") as store:
        store.add(Run(experiment="overhead", machine={"machine_id": ""}, run_id="overhead"))
        yield store, store.new_trace("overhead", "bench")


def _shown(found: Overhead, goal: float | None) -> str:
    wall, cpu = (f"{x.estimate:+7.2%} [{x.low:+.2%} … {x.high:+.2%}]" for x in (found.wall, found.cpu))
    held = "" if goal is None else f"  goal < {goal:.0%}: {'holds' if found.wall.high < goal else 'not shown'}"
    return f"  {found.mode:13} wall {wall}  cpu {cpu}  n={found.rounds}  threads {found.threads:.2%}{held}"


def _modes(model, name, call, budget_s):
    print(f"{name}, by mode (k = 16), amortised; again is the bare call against itself")
    with _trace() as (_, trace):
        modes = {mode: ProfilingConfig.named(mode) for mode in MODES}
        for found in measure_overhead(model, call, modes, sink=trace, budget_s=budget_s, rel_ci=0.001):
            print(_shown(found, GOALS.get(found.mode)))
            if found.mode == "deep":
                closest, bare = found.pass_ms
                print(f"  one deep pass takes {closest:.1f} ms, a bare call {bare:.1f} ms")


def _components(model, name, call, budget_s):
    print(f"{name}, by component, if every call had it")
    layers = sum(1 for _, module in model.named_modules() if type(module).__name__ == "Block")
    with _trace() as (_, trace):
        for found in measure_overhead(model, call, COMPONENTS, sink=trace, budget_s=budget_s, rel_ci=0.001):
            bare = found.pass_ms[1]
            extra_us = 1e3 * bare * (found.wall.estimate - found.threads)
            each = f"  {extra_us / layers:7.1f} us per layer" if found.mode != "again" else ""
            rows = f"  {found.rows:.0f} rows" if found.rows else ""
            print(_shown(found, None) + each + rows)
        print(f"  database: {1e6 * trace.seconds_per_row():.2f} us of a thread's processor time per row")
    meter = EnergyMeter()
    start = time.thread_time()
    for _ in range(200):
        meter.read()
    print(f"  sampler: {1e6 * (time.thread_time() - start) / 200:.0f} us per reading of {len(meter.tracks)} source(s)")


def _stored(model, call):
    """Bytes that the database grows by per token, power samples included, as its pages hold them."""
    for mode in MODES:
        config, tokens = ProfilingConfig.named(mode), 64
        with _trace() as (store, trace):
            pages = "SELECT page_count - freelist_count FROM pragma_page_count, pragma_freelist_count"
            before = store.connection.execute(pages).fetchone()[0]
            meter = EnergyMeter(sample_s=config.power_sample_interval_ms / 1e3, sink=trace)
            with meter, LayerProfiler(model, config, sink=trace):
                for _ in range(tokens):
                    begin = time.monotonic()
                    call()
                    trace.put("tokens", [(trace.at_us(begin), round(1e9 * (time.monotonic() - begin)))])
            store.commit_transaction()
            size = store.connection.execute("PRAGMA page_size").fetchone()[0]
            grown = (store.connection.execute(pages).fetchone()[0] - before) * size / tokens
            held = "holds" if grown <= BYTES[mode] else "exceeded"
            print(f"  {mode:9} {grown:7.0f} bytes per token, goal at most {BYTES[mode]}: {held}")


def _torch_profiler(name, call):
    bare, watched = [], []
    for at in range(PEER_ROUNDS):
        for which in (0, 1) if at % 2 else (1, 0):
            context = torch_profile(activities=[ProfilerActivity.CPU]) if which else contextlib.nullcontext()
            with context:
                start = time.perf_counter()
                call()
                (watched if which else bare).append(time.perf_counter() - start)
    low, ratio, high = compare_paired(bare, watched).interval
    print(f"  torch.profiler, {name}: {ratio - 1:+.1%} [{low - 1:+.1%} … {high - 1:+.1%}], n={PEER_ROUNDS}")


# Installed for the time of the benchmark, behind what is there already: they bring other versions of it.
_PEERS = {
    "codecarbon==3.3.2": """
        from codecarbon import OfflineEmissionsTracker
        tracker = OfflineEmissionsTracker(country_iso_code="USA", save_to_file=False, log_level="error", measure_power_secs=1)
        start, stop = tracker.start, tracker.stop
        """,
    "zeus==0.16.0": """
        from zeus.monitor import ZeusMonitor
        monitor = ZeusMonitor()
        start, stop = (lambda: monitor.begin_window("w")), (lambda: monitor.end_window("w"))
        """,
}


def _other_peers(preset, layers):
    """In a process of their own: they start threads and patch what they import."""
    for requirement, setup in _PEERS.items():
        with tempfile.TemporaryDirectory() as folder:
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", folder, requirement]
            installed = subprocess.run(install, capture_output=True, text=True, check=False)
            told = _last_line(installed) if installed.returncode else _peer(folder, setup, preset, layers)
        print(f"  {requirement}, decode: {told}")


def _last_line(run: subprocess.CompletedProcess[str]) -> str:
    return (run.stdout.strip() or run.stderr.strip() or "no answer").splitlines()[-1]


def _peer(folder, setup, preset, layers):
    code = (
        f"import sys; sys.path.append({folder!r})"
        + textwrap.dedent(setup)
        + textwrap.dedent(
            f"""
            import time, torch
            from nanolib import NanoConfig, create_model
            from nanolib.models.generation import Generation
            from nanolib.stats.compare import compare_paired
            model = create_model(NanoConfig.from_preset({preset!r}, **{layers!r}), seed=0).eval()
            generation = Generation(model, torch.randint(300, (1, 256)), 64)
            generation.prefill()
            def took(watched):
                if watched: start()
                begin = time.perf_counter()
                for _ in range(32): generation.decode()
                seconds = time.perf_counter() - begin
                if watched: stop()
                return seconds
            took(False)
            pairs = [[took(w) for w in order] [::step] for order, step in (((False, True), 1), ((True, False), -1)) * 4]
            low, ratio, high = compare_paired(*zip(*pairs)).interval
            print(f"{{ratio - 1:+.1%}} [{{low - 1:+.1%}} … {{high - 1:+.1%}}], n={{len(pairs)}}")
            """
        )
    )
    return _last_line(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False))


def main() -> None:
    """Print everything for decode and prefill."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--preset", default="decoder_small")
    parser.add_argument("--layers", type=int)
    args = parser.parse_args()
    layers = {} if args.layers is None else {"num_layers": args.layers}
    torch.manual_seed(0)
    model = create_model(NanoConfig.from_preset(args.preset, **layers), seed=0).eval()
    generation = Generation(model, torch.randint(300, (1, 256)), 64)
    generation.prefill()
    generation.decode()
    for name, call, share in (
        ("decode of one token", generation.decode, 0.3),
        ("prefill of 256", generation.prefill, 0.4),
    ):
        _modes(model, name, call, 60 * args.minutes * share)
        _components(model, name, call, 60 * args.minutes * 0.15)
    print("stored, decode, k = 16")
    _stored(model, generation.decode)
    print("peers")
    for name, call in (("decode", generation.decode), ("prefill", generation.prefill)):
        _torch_profiler(name, call)
    _other_peers(args.preset, layers)


if __name__ == "__main__":
    main()
