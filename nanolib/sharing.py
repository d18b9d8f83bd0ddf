"""What a file for others must not tell: absolute paths, hosts, tracebacks."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Collection, Mapping
from typing import Any

from nanolib.measurement import RunStatus

DROPPED = ("corpus", "rendezvous", "traceback")
_END = r"\s'\"`,:;<>()\[\]{}|"
_PATH = re.compile(rf"(?<![\w/~.\-])(?:[A-Za-z]:)?(?:[/\\][^/\\{_END}]+){{2,}}[/\\]?")


def shareable(value: Any, hosts: Collection[str] = ()) -> Any:
    """JSON types without what tells whose machine it was: an absolute path leaves its file's name, a host nothing.

    Args:
        value: JSON types.
        hosts: Names of hosts to leave out wherever they stand.
    """
    if isinstance(value, str):
        text = _PATH.sub(_last, value)
        for host in filter(None, hosts):
            text = text.replace(host, "…")
        return text
    if isinstance(value, Mapping):
        return {name: shareable(item, hosts) for name, item in value.items() if name not in DROPPED}
    if isinstance(value, list | tuple):
        return [shareable(item, hosts) for item in value]
    return value


def hosts_of(params: Mapping[str, Any]) -> list[str]:
    """Hosts that a run's parameters name."""
    host = str(params.get("rendezvous", "")).rpartition(":")[0]
    return [host] if host and host not in ("localhost", "127.0.0.1") else []


def make_shareable(db: sqlite3.Connection) -> None:
    """Leave out of every text what tells whose machine it was; a run in flight will get no further here."""
    hosts = {}
    for run_id, params, disturbances, *texts in db.execute(
        "SELECT run_id, params, disturbances, message, label FROM runs"
    ).fetchall():
        hosts[run_id] = hosts_of(json.loads(params))
        told = [_text(shareable(json.loads(text), hosts[run_id])) for text in (params, disturbances)]
        told += [shareable(text, hosts[run_id]) for text in texts]
        db.execute(
            "UPDATE runs SET process = '', params = ?, disturbances = ?, message = ?, label = ? WHERE run_id = ?",
            (*told, run_id),
        )
    db.execute("UPDATE runs SET status = ? WHERE status = ?", (RunStatus.INTERRUPTED, RunStatus.RUNNING))
    for number, run_id, factors, details, *texts in db.execute(
        "SELECT id, run_id, factors, details, message, label FROM measurements"
    ).fetchall():
        told = [_text(shareable(json.loads(text), hosts[run_id])) for text in (factors, details)]
        told += [shareable(text, hosts[run_id]) for text in texts]
        if told != [factors, details, *texts]:
            db.execute(
                "UPDATE measurements SET factors = ?, details = ?, message = ?, label = ? WHERE id = ?", (*told, number)
            )


def _text(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def _last(match: re.Match[str]) -> str:
    name = re.split(r"[/\\]", match[0].rstrip("/\\"))[-1]
    return f"…/{name}" if "." in name.strip(".") else "…"  # a folder's name may be a person's
