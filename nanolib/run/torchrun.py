"""Measure the cases of the distributed notebook on the ranks of torchrun, on a trusted network.

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 4 \
        --master-addr 10.0.0.1 --master-port 29400 \
        -m nanolib.run.torchrun distributed -f params/full/distributed.yml

Run this command on each machine, and give each machine its own node rank. Rank 0 chooses the cases,
takes part in them, and stores the rows. The other ranks read the requests of rank 0 from torchrun's
store, as JSON. The run ends if a machine is lost, and `resume: true` in the file continues the run.
"""

import itertools
import json
import os
import signal
import sys
import time
from importlib import import_module
from typing import Any

import click
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from nanolib.measurement import BadInput, cause
from nanolib.params import read_yaml
from nanolib.paths import FIRST_VARIABLE
from nanolib.run import ranks
from nanolib.run.ranks import Message, answer, raised_in, results_in
from nanolib.run.sweep import measure

_POLL_S = 0.02
_LATE_S = 10.0  # All ranks have the same time limits, so other ranks end soon after rank 0.


class RankLost(BaseException):
    """A rank no longer answers, so the run cannot measure another case."""


class Ranks:
    """The ranks that torchrun has started.

    Attributes:
        rank: Rank of this process.
        world_size: Number of ranks on all machines.
        ranks_per_node: Number of ranks on each machine.
    """

    def __init__(self):
        self._store, self.rank, self.world_size = next(rendezvous("env://"))
        self.ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        self._numbers = itertools.count()

    def run(self, request: Message | None) -> list[Any]:
        """Send a case to the other ranks from rank 0, take part, and return each rank's result.

        Args:
            request: Request of `run_ranks`, or None to end the other ranks.

        Raises:
            RankFailed: A rank raised an exception.
            RankLost: A rank no longer answers.
        """
        number = next(self._numbers)
        self._store.set(f"case/{number}", json.dumps(request))
        if request is None:
            return []
        world_size, store = request["world_size"], self._take_part(number, request)
        deadline = time.monotonic() + _LATE_S
        while not all(results := results_in(store, world_size)):
            if time.monotonic() > deadline:
                raise RankLost(
                    f"rank {results.index({})} of {world_size} does not answer; "
                    "set resume: true, and start all ranks again"
                )
            time.sleep(_POLL_S)
        raised, _ = raised_in(results)
        if raised:
            raise raised
        return [result["answer"] for result in results]

    def serve(self) -> None:
        """On a rank above 0, take part in each case until rank 0 has no more cases."""
        for number in self._numbers:
            while not self._store.check([f"case/{number}"]):
                time.sleep(_POLL_S)
            request = json.loads(self._store.get(f"case/{number}"))
            if request is None:
                return
            if self.rank < request["world_size"]:
                self._take_part(number, request)

    def _take_part(self, number: int, request: Message) -> dist.Store:
        """Call a request's function in a new process group, and return the store of its results."""
        threads, store = torch.get_num_threads(), dist.PrefixStore(f"ranks/{number}", self._store)
        answer(request, store, self.rank)
        if dist.is_initialized():  # There is no group if another rank never joined.
            dist.destroy_process_group()
        torch.set_num_threads(threads)
        return store


@click.command(help=__doc__)
@click.argument("notebook", type=click.Choice(["distributed"]))
@click.option("-f", "file", required=True, help="Read parameters from this file.")
def main(notebook: str, file: str) -> None:
    """Parse the command line of this rank, then measure on rank 0 or take part on other ranks."""
    experiment = import_module("nanolib.experiments").ALL[notebook]()
    os.environ.setdefault(FIRST_VARIABLE, str(os.getppid()))  # The ranks belong together.
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        params = experiment.Params(**read_yaml(file))
        if "LOCAL_WORLD_SIZE" not in os.environ:
            raise BadInput("torchrun: start this command with torchrun, as in docs/recipes.md")
        group = Ranks()
        # A cluster ends a job with SIGTERM. The run then stops as after Ctrl-C.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if not is_first:
            return group.serve()
        ranks.use(group)
        run = measure(experiment, params)
        print(run, run.finish(), sep="\n")
        group.run(None)
    except BadInput as error:
        if is_first:
            print(error, file=sys.stderr)
        sys.exit(2)
    except (RankLost, dist.DistError) as error:
        print(cause(error), file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)  # A normal exit could block, because gloo's threads wait for the lost rank.


if __name__ == "__main__":
    main()
