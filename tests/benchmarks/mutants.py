"""How many deliberate faults the tests find: a seeded sample of mutants of what decides numbers, each with its own tests.

A place in the sources is drawn first, and then one of the mutations that cosmic-ray knows for it, so that a product, which has
eleven, weighs no more than a comparison. What changes nothing while the program is right is left out: annotations, which nothing
runs; the star after which parameters are named, which cosmic-ray takes for a product; `is` in the place of `==`, which is the same
for small numbers and names; `strict` and `frozen`, which assert; caches, which save time; and `@staticmethod` of functions that
torch reaches through their class; and functions that draw a chart, which is looked at. Mutants live in copies of the working tree.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import itertools
import os
import random
import subprocess
import sys
import tempfile
import time
import tokenize
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

from nanolib.paths import checkout

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.working_tree import copied  # which takes the tree as the test of the recipes does

# Where mutants are drawn → the tests that must find them, the nearest first: a file, or a folder's other files.
_CORE, _DCA, _RANKS = "tests/models/test_attention.py", "tests/models/test_dca.py", "tests/models/test_ranks.py"
_CEILINGS, _LAYERS = "tests/meters/test_ceilings.py", "tests/meters/test_layers.py"
_PLANS, _ENERGY = "tests/run/test_plan_memory.py", "tests/experiments/test_energy.py"
_LAYOUT, _DISTRIBUTED = "tests/models/test_layout.py", "tests/experiments/test_distributed.py"
_CLOCKWORK, _TOGETHER = "tests/meters/test_clockwork.py", "tests/meters/test_together.py"
_SAID = ("claims", "attention_claims", "model_claims", "rank_claims", "fp8_claims")
_SHOWN = ("subtitles", "more_tables", "columns", "more_rooms", "report")
_CLAIMS = [f"tests/report/test_{name}.py" for name in (*_SAID, *_SHOWN)]
_CLAIMS.append("tests/test_features.py")  # the sentences and tables of stored results
_VIEWS = "nanolib/experiments/{}/view"
TESTS = {
    "nanolib/stats": ["tests/stats"],
    "nanolib/stats/compare.py": ["tests/stats/test_compare.py", "tests/compare/test_compare.py"],
    "nanolib/stats/intervals.py": ["tests/stats/test_intervals.py", "tests/stats/test_other.py"],
    "nanolib/stats/steady.py": ["tests/stats/test_steady.py", "tests/meters/test_latency.py"],
    "nanolib/meters": ["tests/meters", _ENERGY],
    "nanolib/meters/layers/activations.py": [_CLOCKWORK, _LAYERS],
    "nanolib/meters/ceilings.py": [_CEILINGS],
    "nanolib/meters/time/clock.py": ["tests/meters/test_clock.py", "tests/meters/test_memory.py"],
    "nanolib/meters/flops.py": ["tests/meters/test_flops.py", _PLANS],
    "nanolib/meters/time/latency.py": ["tests/meters/test_latency.py"],
    "nanolib/meters/layers/profiler.py": [_CLOCKWORK, _LAYERS, _ENERGY],
    "nanolib/meters/machine.py": ["tests/meters/test_machine.py", "tests/run/test_devices.py"],
    "nanolib/meters/memory.py": ["tests/meters/test_memory.py", _PLANS],
    "nanolib/meters/layers/operations.py": [_CLOCKWORK, _LAYERS, _ENERGY],
    "nanolib/meters/layers/overhead.py": ["tests/meters/test_overhead.py", _CLOCKWORK, _ENERGY],
    "nanolib/meters/energy/power.py": ["tests/meters/test_power.py", "tests/meters/test_sensors.py"],
    "nanolib/meters/energy/meter.py": ["tests/meters/test_power.py", _ENERGY],
    "nanolib/meters/energy/integration.py": ["tests/meters/test_integration.py", "tests/meters/test_sensors.py"],
    "nanolib/meters/quiet.py": ["tests/meters/test_quiet.py"],
    "nanolib/meters/cpu_load.py": ["tests/meters/test_cpu_load.py"],
    "nanolib/meters/limits.py": ["tests/meters/test_limits.py"],
    "nanolib/run/interference.py": ["tests/run/test_interference.py"],
    "nanolib/meters/layers/trace.py": ["tests/meters/test_trace.py"],
    "nanolib/meters/links.py": [_TOGETHER, _DISTRIBUTED],
    "nanolib/meters/network.py": [_TOGETHER, _DISTRIBUTED],
    "nanolib/meters/layers/profiling.py": [_CLOCKWORK, _LAYERS],
    "nanolib/meters/time/stopwatch.py": ["tests/meters/test_stopwatch.py", _CLOCKWORK, _LAYERS],
    "nanolib/meters/time/timer.py": [_TOGETHER, _RANKS],
    "nanolib/meters/time/together.py": [_TOGETHER, _DISTRIBUTED],
    "nanolib/models/attention": [_CORE, "tests/models/test_block_sparse.py", "tests/models/test_flash_attn.py", _DCA],
    "nanolib/models/attention/dynamic.py": ["tests/models/test_dynamic.py", _DCA, _CORE],
    "nanolib/models/attention/flex.py": ["tests/models/test_flex.py"],
    "nanolib/models/attention/layout.py": [_LAYOUT, _RANKS],
    "nanolib/models/attention/partial.py": [_RANKS],
    "nanolib/models/attention/ranks.py": [_RANKS],
    "nanolib/models/attention/ring.py": [_LAYOUT, _RANKS],
    "nanolib/models/attention/traffic.py": ["tests/models/test_traffic.py", _RANKS],
    "nanolib/models/attention/tree.py": [_RANKS],
    "nanolib/models/attention/ulysses.py": [_RANKS],
    "nanolib/compare/compare.py": ["tests/compare/test_compare.py", "tests/compare/test_history.py"],
    "nanolib/compare/history.py": ["tests/compare/test_history.py"],
    **{f"nanolib/report/{name}.py": _CLAIMS for name in ("overview", "roofline", "tables")},
    **{f"{_VIEWS.format('attention')}/{name}.py": _CLAIMS for name in ("quality", "tables", "words")},
    **{f"{_VIEWS.format('model')}/{name}.py": _CLAIMS for name in ("tables", "words")},
    "nanolib/experiments/warmup/view.py": _CLAIMS,
    _VIEWS.format("energy"): [*_CLAIMS, "tests/report/test_energy.py"],
    _VIEWS.format("fp8"): [*_CLAIMS, "tests/experiments/test_fp8.py"],
    _VIEWS.format("distributed"): [*_CLAIMS, _DISTRIBUTED],
    "nanolib/store": [
        "tests/store/test_store.py",
        "tests/store/test_reading.py",
        "tests/store/test_file.py",
        "tests/store/test_traces.py",
        "tests/store/test_newest.py",
        "tests/store/test_merging.py",
    ],
    "nanolib/run/sweep.py": ["tests/run/test_sweep.py", "tests/run/test_runner.py"],
}


@dataclass(frozen=True)
class Mutant:
    """One fault: the n-th place of a file where an operator of cosmic-ray fits."""

    path: str
    operator: str
    occurrence: int
    line: int


def main() -> None:
    """Print the survivors, then the share that was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[""], help="draw from files whose path has one of these in it")
    parser.add_argument(
        "--start", type=int, default=0, help="leave out so many of the sample: a run that was stopped goes on"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=900.0, help="of the tests of one mutant, s; a hang is found")
    options = parser.parse_args()
    root = checkout()
    sample = drawn(root, options.mutants, options.seed, options.only)[options.start :]
    with tempfile.TemporaryDirectory() as name:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.workers):
            copies.put(_copy(root, Path(name) / str(number)))

        def with_a_copy(work: Callable[[Path], bool]) -> bool:
            copy = copies.get()
            try:
                return work(copy)
            finally:
                copies.put(copy)

        def sound(test: str) -> bool:
            return not with_a_copy(lambda copy: _fails(copy, [test], options.timeout))

        def found(mutant: Mutant) -> bool:
            return with_a_copy(lambda copy: _found(copy, mutant, options.timeout))

        with ThreadPoolExecutor(options.workers) as workers:
            tests = {test for mutant in sample for test in _tests_of(mutant.path)}
            needed = sorted(test for test in tests if str(Path(test).parent) not in tests)
            for test, passed in zip(needed, workers.map(sound, needed), strict=True):
                if not passed:
                    sys.exit(f"{test} fails without any mutant")
            start, results = time.perf_counter(), []
            for mutant, was_found in zip(sample, workers.map(found, sample), strict=True):
                results.append(was_found)
                print(
                    f"{options.start + len(results)}: {mutant.path}:{mutant.line} {'found' if was_found else 'NOT FOUND'}",
                    flush=True,
                )
    print(
        f"{sum(results)} of {len(sample)} mutants found (seed {options.seed}), {time.perf_counter() - start:.0f} s",
        flush=True,
    )
    sys.exit(sum(results) < 0.9 * len(sample))


def drawn(root: Path, count: int, seed: int, only: Sequence[str] = ("",)) -> list[Mutant]:
    """A sample of places without replacement, and of each one mutation."""
    places: dict[tuple[str, int, int], list[Mutant]] = {}
    files = {
        path for name in TESTS for path in ((root / name).glob("*.py") if (root / name).is_dir() else [root / name])
    }
    for path in sorted(files):
        relative = str(path.relative_to(root))
        if any(part in relative for part in only):
            for position, mutant in _mutants(path, relative):
                places.setdefault((relative, *position), []).append(mutant)
    random_choice = random.Random(seed)
    chosen = random_choice.sample(sorted(places), min(count, len(places)))
    sample = [random_choice.choice(places[place]) for place in chosen]
    return [mutant for mutant in sample if _mutated((root / mutant.path).read_text(encoding="utf-8"), mutant)]


def _mutated(source: str, mutant: Mutant) -> str | None:
    """The source with the fault in it; None for those few that cosmic-ray knows but cannot make (a dotted exception)."""
    try:
        return mutate_code(source, get_operator(mutant.operator)(), mutant.occurrence)
    except AttributeError:
        return None


def _mutants(path: Path, relative: str) -> Iterator[tuple[tuple[int, int], Mutant]]:
    """Every mutation of a file outside what changes nothing, with its line and column."""
    source = path.read_text(encoding="utf-8")
    tree, silent = get_ast(source), [*_unheard(source), *_stars(source)]
    for name in operator_names():
        operator_class = get_operator(name)
        if operator_class.arguments() or name.endswith(("_Eq_Is", "_NotEq_IsNot")):
            continue
        operator = operator_class()
        places = (place for node in ast_nodes(tree) for place in operator.mutation_positions(node))
        for occurrence, (position, _) in enumerate(places):
            if not any(start <= position < end for start, end in silent):
                yield position, Mutant(relative, name, occurrence, position[0])


_Span = tuple[tuple[int, int], tuple[int, int]]  # from a line and column to another


def _unheard(source: str) -> Iterator[_Span]:
    """Annotations, assertions, charts, and decorators of caches and of what torch reaches through its class."""
    for node in ast.walk(ast.parse(source)):
        for found in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if isinstance(found, ast.expr):
                yield (found.lineno, found.col_offset), (found.end_lineno, found.end_col_offset)
        if isinstance(node, ast.keyword) and node.arg in ("strict", "frozen"):
            yield (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
        if isinstance(node, ast.FunctionDef):
            if node.returns is not None and ast.unparse(node.returns).startswith("alt."):
                yield (node.lineno, 0), (node.end_lineno + 1, 0)
            is_reached_by_torch = [argument.arg for argument in node.args.args][:1] == ["ctx"]
            for decorator in node.decorator_list:
                name = ast.unparse(decorator)
                is_a_cache = name == "functools.cache" or name.startswith(
                    ("functools.lru_cache", "functools.wraps", "cached")
                )
                if is_a_cache or (name == "staticmethod" and is_reached_by_torch):
                    yield (decorator.lineno, 0), (decorator.end_lineno, decorator.end_col_offset + 1)


def _stars(source: str) -> Iterator[_Span]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    for star, after in itertools.pairwise(tokens):
        if star.string == "*" and after.string == ",":
            yield star.start, star.end


def _copy(root: Path, copy: Path) -> Path:
    """The working tree elsewhere, as a repository, so that a mutant can be shown as a change."""
    copied(copy, root)
    for command in (
        ["git", "init", "--quiet"],
        ["git", "add", "."],
        ["git", *_AUTHOR, "commit", "--quiet", "-m", "copy"],
    ):
        subprocess.run(command, cwd=copy, check=True)
    return copy


_AUTHOR = ["-c", "user.name=mutants", "-c", "user.email=mutants@localhost"]


def _found(copy: Path, mutant: Mutant, timeout: float) -> bool:
    """Whether the tests of the mutant's file fail with it."""
    path = copy / mutant.path
    source = path.read_text(encoding="utf-8")
    path.write_text(_mutated(source, mutant) or source, encoding="utf-8")
    try:
        found = _fails(copy, _tests_of(mutant.path), timeout)
        if not found:
            changed = subprocess.run(
                ["git", "diff", "-U0", mutant.path], cwd=copy, capture_output=True, text=True
            ).stdout
            lines = [line for line in changed.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
            print("\n".join([f"not found: {mutant.path}:{mutant.line} {mutant.operator}", *lines]), flush=True)
        return found
    finally:
        path.write_text(source, encoding="utf-8")


def _tests_of(path: str) -> list[str]:
    return TESTS.get(path) or TESTS[str(Path(path).parent)]


def _fails(copy: Path, tests: list[str], timeout: float) -> bool:
    """Whether these tests fail, hang included; the quick ones are asked first."""
    return any(_ends_badly(copy, ["-m", marks, *tests], timeout) for marks in ("not slow", "slow"))


def _ends_badly(copy: Path, arguments: list[str], timeout: float) -> bool:
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=copy, env=environment, start_new_session=True, **quiet)
    try:
        return process.wait(timeout) not in (0, 5)  # 5: none has these marks
    except subprocess.TimeoutExpired:
        return True
    finally:
        with contextlib.suppress(ProcessLookupError):  # what it left running
            os.killpg(process.pid, 9)


if __name__ == "__main__":
    main()
