"""The distributed notebook's cases on ranks that torchrun has started, on a network that you trust.

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 4 --master-addr 10.0.0.1 --master-port 29400 \
        -m nanolib.run.torchrun distributed -f params/full/distributed.yml

Run the same command on each machine, with its own node rank. Rank 0 chooses the cases, takes part in them and stores the rows;
the others take what it asks from torchrun's store, as JSON. A machine that is lost ends the run, and `--resume` continues it.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from nanolib.measurement import BadInput
from nanolib.params import read_value, read_yaml
from nanolib.run import ranks
from nanolib.run.rank import answer, raised
from nanolib.run.sweep import measure

_POLL_S = 0.02
_LATE_S = 10.0  # after rank 0 has ended, for the others: they have the same time limits


class RankLost(BaseException):
    """A rank does not answer any more: no case can follow."""


class Ranks:
    """The processes of torchrun, as each of them sees them.

    Attributes:
        rank: Which this is.
        world_size: How many there are.
        ranks_per_node: How many of them are on each machine.
    """

    def __init__(self) -> None:
        self._store, self.rank, self.world_size = next(rendezvous("env://"))
        self.ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        self._number = 0

    def run(self, asked: dict[str, Any]) -> list[Any]:
        """On rank 0: what each rank of a case answers.

        Raises:
            RankFailed: One raised.
            RankLost: One does not answer.
        """
        number = self._number
        self._number += 1
        self._store.set(f"case/{number}", json.dumps(asked))
        self._answer(number, asked)
        found = [self._answered(number, rank) for rank in range(asked["world_size"])]
        if errors := [one["error"] for one in found if "error" in one]:
            raise raised(errors, asked["world_size"])[0]
        return [one["answer"] for one in found]

    def serve(self) -> None:
        """On the others: answer, case after case, until rank 0 has no more."""
        for number in itertools.count():
            while not self._store.check([f"case/{number}"]):
                time.sleep(_POLL_S)
            asked = json.loads(self._store.get(f"case/{number}"))
            if asked is None:
                return
            if self.rank < asked["world_size"]:
                self._answer(number, asked)

    def end(self) -> None:
        """On rank 0: let the others end."""
        self._store.set(f"case/{self._number}", "null")

    def _answer(self, number: int, asked: dict[str, Any]) -> None:
        """Take part in a case, in a process group of its own."""
        threads = torch.get_num_threads()
        told = answer(asked, dist.PrefixStore(f"ranks/{number}", self._store), self.rank)
        self._store.set(f"answer/{number}/{self.rank}", json.dumps(told))
        with contextlib.suppress(RuntimeError):  # all have answered; another may be gone
            if "answer" in told:
                dist.barrier()
            dist.destroy_process_group()
        torch.set_num_threads(threads)

    def _answered(self, number: int, rank: int) -> dict[str, Any]:
        deadline = time.monotonic() + _LATE_S
        while not self._store.check([key := f"answer/{number}/{rank}"]):
            if time.monotonic() > deadline:
                raise RankLost(
                    f"rank {rank} of {self.world_size} does not answer; start all again with --resume"
                )
            time.sleep(_POLL_S)
        return json.loads(self._store.get(key))


@click.command(help=__doc__)
@click.argument("notebook", type=click.Choice(["distributed"]))
@click.option("-f", "file", required=True, type=click.Path(path_type=Path), help="A params file.")
@click.option(
    "-p", "pairs", multiple=True, metavar="NAME=VALUE", help="A parameter that replaces the file's."
)
@click.option("--label", default="", help="Your name for the run.")
@click.option(
    "--resume",
    is_flag=True,
    help="Continue the last run with the same parameters, version and machine.",
)
def main(notebook: str, file: Path, pairs: tuple[str, ...], label: str, resume: bool) -> None:
    """See the module."""
    experiment = importlib.import_module("nanolib.experiments").ALL[notebook]()
    first = os.environ.get("RANK") == "0"
    try:
        given = {
            name: read_value(name, text)
            for name, _, text in (pair.partition("=") for pair in pairs)
        }
        params = experiment.Params(**read_yaml(file) | given | {"label": label, "resume": resume})
        if "LOCAL_WORLD_SIZE" not in os.environ:
            raise BadInput(
                "torchrun: this is none of its processes; start it as docs/recipes.md says"
            )
        if params.isolation == "process":
            raise BadInput(
                "isolation: torchrun's processes are the ranks of all cases; leave it out"
            )
    except BadInput as error:
        if first or "RANK" not in os.environ:
            print(*error.lines, sep="\n", file=sys.stderr)
        sys.exit(2)
    group = Ranks()
    try:
        if not first:
            return group.serve()
        ranks.use(group)
        run = measure(experiment, params)
        print(run, run.finish(), sep="\n")
        group.end()
    except (RankLost, dist.DistError) as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)  # gloo's threads may wait for who is lost


if __name__ == "__main__":
    main()
