"""What a file for others must not tell (paths, names of people and machines, tracebacks), and how such a file comes to be."""

from __future__ import annotations

import contextlib
import functools
import getpass
import hashlib
import json
import os
import platform
import re
import signal
import sqlite3
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nanolib.measurement import BadInput, RunStatus

_ANY_HOST = ("localhost", "host", "node", "server", "master", "main", "head", "worker", "rank", "gpu", "cpu")
DROPPED = ("corpus", "rendezvous", "traceback")
# Columns that tie rows together: one that tells something becomes a digest, the same wherever it stands.
_KEYS = ("run_id", "machine_id", "case_id", "launch", "fingerprint")
_ONCE = ("run_id", "case_id", "metric", "scope", "method")  # no two measurements agree in these

# Whose names are kept; any other last part of a path may be a person's.
_ENDINGS = (
    "bin c cc cpp csv cu db gguf h html ipynb json log md png pt pth py safetensors so sqlite svg toml txt yaml yml"
)
_FILE = re.compile(rf"[/\\]([\w.+\- ]*\w\.(?:{'|'.join(_ENDINGS.split())})(?::\d+)*)\Z")
_HOMES = r"(?i:home|users|documents and settings)"

_SEPARATOR = r"[/\\∕⁄／＼]+"
_WORD = r"(?:[^\s/\\'\"`<>|]|(?<=\w)'(?=\w))++"
# A blank is part of a folder's name if no file and no clause ends before it and a separator follows.
_BLANK = "".join(rf"(?<!\.{ending})" for ending in _ENDINGS.split()) + r"(?<![,;:!?.)\]}…])[^\S\r\n]{1,3}"
_FOLDERS = rf"(?:{_WORD}(?:{_BLANK}{_WORD}){{0,3}}{_SEPARATOR})*"
_APART = r"(?<![\w.~\-…)\]}%*/\\])"
_SCHEME = r"(?<![\w+.\-])(?!https?:)[A-Za-z][\w+.\-]*:/{2,}"
_DRIVE = rf"(?<![^\W_])[A-Za-z]:{_SEPARATOR}"
_UPWARDS = rf"(?<![\w.…])(?:\.{{1,2}}|~[\w.+\-]*|\$[A-Za-z_]\w*|\$\{{\w+\}}|%\w+%){_SEPARATOR}"
_ROOT = rf"(?:{_SCHEME}|{_DRIVE}|{_UPWARDS}|{_SEPARATOR}(?=\w[^\s/\\]))"
_OPTION = r"(?P<option>-{0,2}[\w\-]+=|-\w+?(?=[/\\~.]|[A-Z]:)|)"

# A text, or what stands in quotes, that begins like a path is one to its end.
_WHOLE = re.compile(rf"\A\s*{_OPTION}{_ROOT}{_FOLDERS}{_WORD}(?:{_BLANK}(?!-){_WORD}){{0,2}}\Z")
_QUOTED = re.compile(rf"(?P<quote>['\"`]){_OPTION}{_ROOT}(?:(?!(?P=quote)(?!\w)).)*(?P=quote)")
_TOKEN = r"[^\s'\"`<>|]"
_TOLD = re.compile(
    rf"(?P<address>\bhttps?://{_TOKEN}+)"
    rf"|(?P<login>(?<!{_TOKEN})(?:(?!@){_TOKEN})++@{_TOKEN}+)"
    rf"|(?P<path>(?:(?<![\w\-])-{{1,2}}[A-Za-z]\w*?(?P<flagged>{_SEPARATOR}|[A-Z]:{_SEPARATOR})|{_SCHEME}|{_DRIVE}|{_UPWARDS}"
    rf"|{_APART}(?:\\{{2,}}|{_SEPARATOR}{_WORD}{_SEPARATOR})|[/\\]{_HOMES}{_SEPARATOR}){_FOLDERS}(?:{_WORD})?)"
    rf"|{_APART}/(?=[\w\-]*[^\W\d])\w[\w.\-]{{2,}}+(?![/\\])"  # of one name: no /s, no lone /
)
_ENCODED = re.compile(r"(?<!\S)\S*%(?:2[fF]|5[cC])\S*")  # as an address writes a path within it


# What opens a door: after its name, as a request or a command carries it, or by its own form. A token is also a piece of text:
# what follows that word is a key if it looks like one.
# Each is read once, from a word's first letter, or a long word would be read again from each of its letters.
_OPENS = r"(?<![\w\-])(?=[\w\-]*(?:passw(?:or)?d|passphrase|secret|(?:api|private|access)[_\-]?key|sshpass|_pass(?![a-z])))[\w\-]++"
_CODE = r"(?:[^\s'\"]{1000,}|(?=[^\s'\"]{0,999}[A-Za-z])(?=[^\s'\"]{0,999}[\d_])[^\s'\"]{4,})"
_KEY = re.compile(
    rf"(?i)(\bauthorization['\"]?\s*[:=]\s*)[^\s].*"
    rf"|({_OPENS}['\"]?\s*[:=]\s*)(?:'[^']*'|\"[^\"]*\"|{_CODE})"
    rf"|({_OPENS}=)[^\s'\"]+"
    rf"|(--(?:password|secret|api-key|token)\s+)[^\s'\"]+"
    rf"|((?<![\w\-])[\w\-]*+(?<=token)['\"]?\s*[:=]\s*['\"]?|\bbearer\s+){_CODE}"
    r"|(\b)(?:hf_|gh[oprsu]_|github_pat_|glpat-|sk-(?=[\w\-]*\d)|xox[abp]-|AKIA|AIza)[\w\-]{8,}"
)
_NAMES_KEY = re.compile(rf"(?i)\A(?:{_OPENS}|authorization)\Z")
_NAMES_TOKEN = re.compile(r"(?i)\A[\w\-]*token\Z")
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # which a terminal takes out of the middle of a name


class Redaction:
    """Leaves out of whatever goes into one file for others what tells whose machine it was.

    An absolute path, or one from a home folder or upwards, leaves its file's name; a login, a host and a user leave nothing.

    Args:
        params: Of the runs that the file holds, parsed or as text; the host that one names is left out wherever it stands.
    """

    def __init__(self, params: Iterable[Any] = ()) -> None:
        names = _own_names().union(*map(_rendezvous_names, params))
        # a user may be called `dense`: what nanolib itself writes tells nothing
        told = sorted((name for name in names if name and name.lower() not in _own_words()), key=len, reverse=True)
        ends = r"(?<![^\W_])", r"(?![^\W_])"  # an underscore is no letter: results_of_NAME
        self._names = re.compile(f"{ends[0]}(?:{'|'.join(map(re.escape, told))}){ends[1]}", re.I) if told else None
        self._text = functools.lru_cache(10_000)(self._written)

    def value(self, value: Any) -> Any:
        """JSON types without what is private, in keys as in values."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            kept: dict[str, Any] = {}
            for name, item in value.items():
                if name not in DROPPED or not item:
                    kept[_free(self.value(name), kept)] = "…" if _opens_a_door(name, item) else self.value(item)
            return kept
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value

    def rows(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Rows of any table, each a mapping of columns; JSON may be text or parsed.

        A run in flight will get no further in a file, and whoever wrote it is not named. Measurements that differ in nothing
        else any more are numbered in their scope.
        """
        taken: set[int] = set()
        for row in rows:
            told = {name: self._cell(name, value) for name, value in row.items()}
            if set(_ONCE) <= told.keys():
                scope, number = told["scope"], 1
                while (key := hash(tuple(told[name] for name in _ONCE))) in taken:
                    number += 1
                    told["scope"] = f"{scope} ({number})"
                taken.add(key)
            yield told

    def _cell(self, column: str, value: Any) -> Any:
        if column == "process":
            return ""
        if column == "status" and value == RunStatus.RUNNING:
            return str(RunStatus.INTERRUPTED)
        if not isinstance(value, str):
            return self.value(value)
        if column in _KEYS:
            private = not re.fullmatch(r"[0-9a-fA-F-]*", value) and self._text(value) != value
            return f"…{hashlib.sha256(value.encode(errors='surrogatepass')).hexdigest()[:16]}" if private else value
        if value.lstrip()[:1] in ("{", "["):
            with contextlib.suppress(ValueError, RecursionError):  # text that is no JSON is text
                return json.dumps(self.value(json.loads(value)), allow_nan=False)
        return self._text(value)

    def _written(self, text: str) -> str:
        """Bytes that are no UTF-8, which no file can hold as text, are written out."""
        return _ENCODED.sub("…", self._clean(text)).encode(errors="backslashreplace").decode()

    def _clean(self, text: str) -> str:
        text = _KEY.sub(_door, _COLOUR.sub("", text))
        if whole := _WHOLE.match(text):
            text = whole["option"] + _remaining(text)
        elif re.search(r"[/\\@∕⁄／＼]", text):
            text = _TOLD.sub(_told, _QUOTED.sub(_told_in_quotes, text))
        return self._names.sub("…", text) if self._names else text


def _door(found: re.Match[str]) -> str:
    """What stands before the key, which goes."""
    return next(before for before in found.groups() if before is not None) + "…"


def _opens_a_door(name: Any, value: Any) -> bool:
    """Whether a value is a key by the name that it has in a mapping."""
    if _NAMES_KEY.match(str(name)):
        return value not in (None, "", False, True)
    return bool(_NAMES_TOKEN.match(str(name)) and isinstance(value, str) and re.fullmatch(_CODE, value))


def _told(found: re.Match[str]) -> str:
    if address := found["address"]:
        return "…" if "@" in address or re.search(rf"/{_HOMES}/", address) else address
    if found["login"]:
        return "…"
    start = found.start("flagged") - found.start() if found["flagged"] else 0
    return found[0][:start] + _remaining(found[0])


def _told_in_quotes(found: re.Match[str]) -> str:
    quote = found["quote"]
    return quote + found["option"] + _remaining(found[0][1:-1]) + quote


def _remaining(path: str) -> str:
    """Of a path the name of its file, and of the sentence the punctuation after it."""
    end = re.search(r"[,.:;!?)\]}]*\Z", path)
    path = path[: end.start()]
    name = None if re.search(rf"[/\\]{_HOMES}[/\\]+[^/\\]*\Z", path) else _FILE.search(path)
    return (f"…/{name[1]}" if name else "…") + end[0]


def _free(name: Any, taken: Mapping[str, Any]) -> Any:
    """The name, numbered if it is taken."""
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name} ({number})"
    return free


def _rendezvous_names(params: Any) -> set[str]:
    """The host that a run's parameters name, unless it is every machine's own, and its short name, unless that is any host's."""
    if isinstance(params, str):
        with contextlib.suppress(ValueError, RecursionError):  # what is broken names no host
            params = json.loads(params)
    told = params.get("rendezvous") if isinstance(params, Mapping) else ""
    host = str(told or "").rpartition(":")[0].strip("[]")
    short = host.partition(".")[0]
    tells = len(short) >= 3 and not short.isdigit() and short.lower() not in _ANY_HOST
    return {host, short if tells else ""} - {"", "localhost", "127.0.0.1", "::1", "0.0.0.0", "::"}


def _own_names() -> set[str]:
    """This machine's home folder, user and host, where they are long enough to be told from other words."""
    names = {platform.node(), platform.node().partition(".")[0], os.environ.get("SUDO_USER", "")}
    with contextlib.suppress(OSError, KeyError):  # a user without a name
        names.add(getpass.getuser())
    with contextlib.suppress(RuntimeError):  # and one without a home
        names |= {str(Path.home()), Path.home().name}
    return {name for name in names if len(name) >= 3} - {"root", "localhost"}


@functools.cache
def _own_words() -> set[str]:
    """Words that nanolib itself writes: its string constants of one word."""
    sources = (path.read_text(encoding="utf-8") for path in Path(__file__).parents[1].rglob("*.py"))
    return {word.lower() for text in sources for word in re.findall(r"['\"]([A-Za-z][\w\-]*)['\"]", text)}


@contextlib.contextmanager
def new_file(target: Path, field: str = "export", *, overwrites: bool = False) -> Iterator[Path]:
    """A file to write to that only its owner reads; after the block it stands at `target`, whole, or nothing does.

    It lies in a folder beside the target.

    Args:
        target: What it will be.
        field: What asked for it, for complaints.
        overwrites: Whether it takes the place of a file that is there.

    Raises:
        BadInput: The target is there, or became so meanwhile, or cannot be written.
    """
    try:
        with TemporaryDirectory(prefix=".nanolib-", dir=target.absolute().parent) as folder, _ended_by_sigterm():
            temporary = Path(folder) / target.name
            temporary.touch()
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            _place(temporary, target, overwrites)
    except FileExistsError:
        raise BadInput(f"{field}: {target} exists; name a new file") from None
    except (OSError, sqlite3.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(
            f"{field}: {target} cannot be written ({reason}); free space there, or name another folder"
        ) from error


def _place(temporary: Path, target: Path, overwrites: bool) -> None:
    """Unlike a rename, a link does not overwrite what has appeared meanwhile; some file systems have none."""
    if overwrites:
        temporary.replace(target)
        return
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError:
        if os.path.lexists(target):
            raise FileExistsError from None
        temporary.rename(target)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """A polite end cleans up as Ctrl-C does; only the main thread may take a signal."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
