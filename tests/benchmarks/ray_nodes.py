"""Three Ray nodes here, of which one is killed in mid-sweep: each case is there once in the end."""

import os
import sqlite3
import sys
import tempfile
import threading
import time
from pathlib import Path

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
from ray.cluster_utils import Cluster

from nanolib.experiments import ALL
from nanolib.params import plan_jobs
from nanolib.run.notebooks import Command
from nanolib.run.on_ray import run_on_ray

SMALL = {
    "attention": {"num_heads": 2, "attention_types": ["dense"], "quality_attentions": []},
    "energy": {"new_tokens": 4},
    "warmup": {"warmup_steps": [0, 2]},
}
KILL_S = 25  # a node's task has had time to measure something


def main():
    """Run three notebooks, kill the node of one that runs, look at what came back."""
    node = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    head = node | {"num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(**node) for _ in range(3)]
    cluster.wait_for_nodes()
    os.environ["RAY_ADDRESS"] = cluster.address
    jobs = [job for name, small in SMALL.items() for job in plan_jobs(ALL, [name], small, {})]
    cases = sum(len(job.cases()) for job in jobs)
    kill = threading.Timer(KILL_S, cluster.remove_node, [nodes[0]], {"allow_graceful": False})
    with tempfile.TemporaryDirectory() as name:
        start = time.perf_counter()
        kill.start()
        ended = run_on_ray(jobs, Command(Path(name)), lambda line: print(line, flush=True))
        took = time.perf_counter() - start
        with sqlite3.connect(Path(name) / "results.sqlite") as db:
            found = db.execute(
                "SELECT run_id || case_id, count(*) FROM measurements"
                " WHERE metric = 'case_duration' AND status = 'ok' GROUP BY 1"
            ).fetchall()
    kill.cancel()
    cluster.shutdown()
    twice = sum(count > 1 for _, count in found)
    is_done = all(end.status == "done" for end in ended)
    whole = took > KILL_S and is_done and not twice and len(found) == cases
    counts = f"{len(found)} of {cases} cases, {twice} twice"
    print(f"{counts}, in {took:.0f} s with a node lost: {'whole' if whole else 'FAILED'}")
    sys.exit(not whole)


if __name__ == "__main__":
    main()
