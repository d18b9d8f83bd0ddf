"""Ranks on several machines: one measures, the others join it, and their ranks meet at a store of the one that measures.

    export NANOLIB_SECRET=...                                                  # the same on all nodes
    nano join 10.0.0.1:29400                                                   # on every other node
    nano run full distributed -p nodes=2 -p rendezvous=10.0.0.1:29400          # on the node with that address

What is asked and what was answered goes through torch's key-value store at that address, so that no folder need be shared: JSON,
never pickle, and believed only with a code (HMAC) that the secret gives for this launch. Whoever reaches the port without it can
disturb a launch but run nothing. What the ranks send each other is neither encrypted nor authenticated: a network that you do not
trust is unsupported.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

import nanolib
from nanolib.measurement import BadInput, shown
from nanolib.run.process import end_tree
from nanolib.run.ranks import launcher
from nanolib.scratch import Scratch

SECRET_VARIABLE = "NANOLIB_SECRET"

_LAUNCHES = "launches"  # how many there have been
_POLL_S = 0.2  # seldom enough to take nothing from the ranks
_LISTEN_S = 5.0  # for reaching one's own port
_SILENT_S = 15.0  # a node that says nothing for so long is gone
_SECRET_LENGTH = 16  # characters, at least


class NodesMissing(Exception):
    """Fewer machines came than a launch needs, or one of them could not take part."""


def address(endpoint: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`.

    Raises:
        BadInput: It is not of that form, or means every address of the machine.
    """
    host, _, port = endpoint.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    with contextlib.suppress(ValueError):  # a name
        host = "" if ipaddress.ip_address(host).is_unspecified else host
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65_536:
        raise BadInput(
            f"rendezvous: {shown(endpoint)} is no HOST:PORT; give an address of this machine, such as 10.0.0.1:29400"
        )
    return host, int(port)


def secret() -> bytes:
    """What all nodes of a launch know and nobody else.

    Raises:
        BadInput: The environment does not tell it, or it is short.
    """
    text = os.environ.get(SECRET_VARIABLE, "")
    if len(text) < _SECRET_LENGTH:
        raise BadInput(
            f"rendezvous: {SECRET_VARIABLE} holds {len(text)} characters; set it on all nodes to the same secret of "
            f"{_SECRET_LENGTH} or more, such as python3 -c 'import secrets; print(secrets.token_urlsafe())' makes"
        )
    return text.encode()


def _sealed(about: str, said: dict[str, Any]) -> str:
    """What a node says, with a code that only who knows the secret can give."""
    text = json.dumps(said)
    return json.dumps({"said": text, "code": _code(about, text)})


def _unsealed(about: str, sealed: bytes) -> dict[str, Any] | None:
    """What another node said; None when its code is not right: anybody may write there."""
    try:
        message = json.loads(sealed)
        right = hmac.compare_digest(message["code"].encode(), _code(about, message["said"]).encode())
        return json.loads(message["said"]) if right else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _code(about: str, text: str) -> str:
    return hmac.new(secret(), f"{about}\n{text}".encode(), hashlib.sha256).hexdigest()


class Launch:
    """One launch over several nodes, as the node sees it that asked for it.

    Attributes:
        asked: What every rank is given.
        interface: Of the network, through which the nodes are reached.
    """

    def __init__(self, store: dist.Store, number: int, nonces: list[str], asked: dict[str, Any]) -> None:
        self._store, self._number, self._nonces = store, number, nonces
        self._others = range(1, len(nonces) + 1)
        # how often each has said that it is there, and when that last rose
        self._heard: dict[int, tuple[int, float]] = {}
        self.asked, self.interface = asked, _interface(asked["host"])

    def others_ended(self) -> bool:
        """Whether the ranks of some other node have ended, in whichever way, or it has not been heard of for long."""
        return any(self._reported(node) or self._silent(node) for node in self._others)

    def collect(self, folder: Path) -> int:
        """End what still runs elsewhere, and put what the ranks there wrote beside what they wrote here.

        Returns:
            How many nodes were lost.

        Raises:
            NodesMissing: A node refused.
        """
        self._store.set(self._key("end"), "")
        deadline = time.monotonic() + 2 * launcher.GRACE_S
        lost = 0
        for node in self._others:
            while not (there := self._reported(node)) and not self._silent(node) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            report = self._report(node) if there else None
            if report is None:
                lost += 1
                continue
            if report["refused"]:
                raise NodesMissing(report["refused"])
            for name, text in report["files"].items():
                with (folder / Path(name).name).open("a") as file:
                    file.write(text)
        return lost

    def _report(self, node: int) -> dict[str, Any] | None:
        key = self._key(f"report/{node}")
        return _unsealed(f"{key} {self._nonces[node - 1]}", self._store.get(key))

    def _reported(self, node: int) -> bool:
        return bool(self._store.check([self._key(f"report/{node}")]))

    def _silent(self, node: int) -> bool:
        heard = self._store.add(self._key(f"alive/{node}"), 0)
        if heard != self._heard.get(node, (None, 0.0))[0]:
            self._heard[node] = (heard, time.monotonic())
        return time.monotonic() - self._heard[node][1] > _SILENT_S

    def _key(self, name: str) -> str:
        return f"{self._number}/{name}"


def ask(endpoint: str, asked: dict[str, Any], *, nodes: int, ranks: int, within_s: float) -> Launch:
    """Have the other nodes start their share of a launch.

    Args:
        endpoint: `HOST:PORT` of this machine.
        asked: What every rank is given; JSON types.
        nodes: This one among them.
        ranks: On each.
        within_s: Until then the others must have come.

    Raises:
        NodesMissing: They did not, or the port is taken.
    """
    secret()
    store = _serve(endpoint)
    number = store.add(_LAUNCHES, 1)
    host, port = address(endpoint)
    deadline = time.monotonic() + within_s
    nonces: list[str] = []
    seen = wrong = 0
    while len(nonces) < nodes - 1:
        if time.monotonic() > deadline:
            store.set(f"{number}/end", "")
            others = f", {wrong} without the secret" if wrong else ""
            raise NodesMissing(
                f"{len(nonces) + 1} of {nodes} nodes came within {within_s:g} s{others}; on each other node run: "
                f"nano join {endpoint}"
            )
        if not store.check([f"{number}/here/{seen + 1}"]):
            time.sleep(_POLL_S)
            continue
        seen += 1
        here = _unsealed(f"{number}/here", store.get(f"{number}/here/{seen}"))
        if here is None:
            wrong += 1
        else:
            nonces.append(here["nonce"])
    meeting = {"host": host, "port": port, "launch": number, "nodes": nodes, "ranks": ranks}
    asked = asked | meeting | {"versions": _versions(), "nonces": nonces}
    store.set(f"{number}/asked", _sealed(f"{number}/asked", asked))
    return Launch(store, number, nonces, asked)


def join(endpoint: str, *, wait_s: float, log: Callable[[str], None], packages: tuple[str, ...] = ("nanolib",)) -> int:
    """Take part in what another machine asks for, until it has asked for nothing for `wait_s`.

    Args:
        endpoint: `HOST:PORT` of the machine that measures; it need not be there yet.
        wait_s: How long to wait for it, and for each next launch, s.
        log: Is told what happens.
        packages: Whose functions it may ask for.

    Returns:
        In how many launches this machine took part.

    Raises:
        BadInput: The endpoint is malformed, or there is no secret.
    """
    host, port = address(endpoint)
    secret()
    log(f"waiting for {endpoint} to ask, at most {wait_s:g} s")
    store, seen, took_part, idle_since = None, 0, 0, time.monotonic()
    while time.monotonic() - idle_since < wait_s:
        try:
            if store is None and _listens(host, port):
                store, seen = _reached(host, port, min(_SILENT_S, wait_s)), 0
            latest = store.add(_LAUNCHES, 0) if store else 0
            if store and latest > seen and not store.check([f"{latest}/end"]):
                took_part += _take_part(store, latest, log, packages)
                idle_since = time.monotonic()
            seen = latest
        except dist.DistError:  # it has ended, or was ended; it, or another, may come again
            store = None
        time.sleep(_POLL_S)
    log(f"nothing was asked for {wait_s:g} s; took part in {took_part} launch(es)")
    return took_part


def _take_part(store: dist.Store, number: int, log: Callable[[str], None], packages: tuple[str, ...]) -> bool:
    """This node's share of a launch; whether there was one."""
    nonce = secrets.token_hex(16)  # what was asked once cannot be asked again by who has listened
    here = store.add(f"{number}/came", 1)
    store.set(f"{number}/here/{here}", _sealed(f"{number}/here", {"nonce": nonce}))
    while not store.check([f"{number}/asked"]):
        if store.check([f"{number}/end"]) or store.add(_LAUNCHES, 0) != number:
            return False
        time.sleep(_POLL_S)
    asked = _unsealed(f"{number}/asked", store.get(f"{number}/asked"))
    if asked is None:
        log(f"launch {number}: asked without this node's {SECRET_VARIABLE}; nothing was run")
        return False
    if nonce not in asked["nonces"]:  # there were enough others
        return False
    node = asked["nonces"].index(nonce) + 1
    refused, files, me = "", {}, f"node {node + 1} of {asked['nodes']}"
    if asked["body"].partition(".")[0] not in packages:
        refused = f"{me} runs functions of {', '.join(packages)} alone, and not {asked['body']}"
    elif asked["versions"] != _versions():
        refused = f"{me} has {_versions()} and the first {asked['versions']}; install the same on both"
    log(refused or f"launch {number}: {asked['ranks']} rank(s) of {asked['body']}")
    if not refused:
        files = _run_share(store, number, node, asked)
    key = f"{number}/report/{node}"
    store.set(key, _sealed(f"{key} {nonce}", {"refused": refused, "files": files}))
    return not refused


def _run_share(store: dist.Store, number: int, node: int, asked: dict[str, Any]) -> dict[str, str]:
    """Run ranks until they end or are to end; what they wrote, by the files' names."""
    with Scratch("ranks") as scratch:
        folder = scratch.path
        interface = _interface(asked["host"])
        process = launcher.start(
            folder, asked, ranks=asked["ranks"], node=node, nodes=asked["nodes"], interface=interface
        )
        try:
            while process.poll() is None and not store.check([f"{number}/end"]):
                store.add(f"{number}/alive/{node}", 1)
                time.sleep(_POLL_S)
            if process.poll() is None:
                launcher.end_ranks(process)
        finally:
            end_tree(process)
        told = (file for file in folder.iterdir() if file.suffix in (".error", ".stack") or file.stem.isdigit())
        return {file.name: file.read_text(errors="replace") for file in (*told, folder / launcher.LOG)}


def _own_address(host: str) -> str:
    """The address of this machine from which the host is reached."""
    family, *_, place = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as route:  # nothing is sent
        route.connect(place)
        return str(route.getsockname()[0])


def _interface(host: str) -> str:
    """The network interface through which the host is reached."""
    mine = _own_address(host)
    having = (name for name, found in psutil.net_if_addrs().items() if any(one.address == mine for one in found))
    return next(having, "")


def _listens(host: str, port: int) -> bool:
    """Whether anyone listens there; torch's store complains loudly where nobody does."""
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True


def _reached(host: str, port: int, within_s: float) -> dist.TCPStore | None:
    """The store there; None where whoever listens says nothing, for which torch would wait without end."""
    found: list[dist.TCPStore] = []

    def reach() -> None:
        with contextlib.suppress(dist.DistError):  # nobody listens any more
            found.append(dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_SILENT_S)))

    thread = threading.Thread(target=reach, daemon=True)
    thread.start()
    thread.join(within_s)
    return found[0] if found else None


def _versions() -> dict[str, str]:
    """What has to be the same on all nodes."""
    return {"nanolib": nanolib.__version__, "torch": torch.__version__}


@functools.cache
def _serve(endpoint: str) -> dist.TCPStore:
    """The store at which the others ask, at that address alone; for as long as this process lives."""
    host, port = address(endpoint)
    try:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(place[:2], family=family).detach()
        timeout = timedelta(seconds=_LISTEN_S)
        return dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listening
        )
    except (OSError, dist.DistError, RuntimeError) as error:
        raise NodesMissing(f"{endpoint} cannot be listened at: {' '.join(str(error).split())[:200]}") from None
