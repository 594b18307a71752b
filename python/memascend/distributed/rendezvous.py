"""Agrees with all ranks on fresh keys in torch's store; rejects loopback addresses and low limits of open files."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import resource
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from memascend.errors import ConfigError, RankError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


_Answer = TypeVar("_Answer")
# A waiting rank looks for a key again after at least this number of seconds. With more than `_LOOKING_MAX` ranks,
# `look_seconds` returns a longer time, because all ranks query one store.
LOOK_SECONDS = 0.01
_LOOKING_MAX = 16
# Seconds to wait for the note of a rank that may just have stopped. A dead rank leaves no note. While a rank waits for
# keys of other ranks, it waits this much longer for torch's store to answer.
WORD_SECONDS = 0.5


def meet(store: Any, rank: int, count: int, timeout: float) -> str:
    """Agrees with all ranks on a prefix for keys that no other attempt of the run has used; a collective call.

    torchrun keeps its store when it restarts the processes, so keys of the previous attempt are still in it. Each rank
    therefore writes a random word. Rank 0 answers each word with a digest of the words of all ranks. If a word changes,
    rank 0 answers again, because the old word was from an earlier attempt. Once all ranks have the same digest, all
    ranks are present.

    Raises:
        RankError: a rank did not come, and the error names it. Or torch's store does not answer.
        ConfigError: a host would give other hosts a loopback address, which the other hosts cannot reach. Or the
            limit of open files is too low on a rank.
    """
    apart: list[int] = []
    try:
        answer, apart = answered(lambda: _Gathering(store, rank, count).answer(timeout), timeout + WORD_SECONDS)
    except RuntimeError as error:
        raise gone((), timeout, store_failed(error)) from error
    if apart:
        raise gone(apart, timeout, "no answer in time")
    if answer["refused"]:
        raise ConfigError(answer["refused"])
    return f"memascend/{answer['digest']}"


class _Gathering:
    """The words of all ranks, in torch's store, which may still have words of an earlier attempt."""

    def __init__(self, store: Any, rank: int, count: int) -> None:
        self._store = store
        self._rank = rank
        self._count = count
        self._word = secrets.token_hex(8)
        # The words that rank 0 answered last.
        self._answered: list[str] = []

    def answer(self, seconds: float) -> tuple[dict[str, str], list[int]]:
        """Returns the answer of rank 0, and the ranks that did not come in time."""
        store, own = self._store, f"memascend/answer/{self._word}"
        store.set(_about(self._word), json.dumps({**_this_host(), "refused": _too_few_files(self._count)}))
        store.set(f"memascend/word/{self._rank}", self._word)
        until, text, found = time.monotonic() + seconds, "", {"digest": ""}
        while True:
            is_over = time.monotonic() > until
            if self._rank == 0:
                self._answer_all()
            if store.check([own]) and text != (new := store.get(own).decode()):
                text, found = new, json.loads(new)
                store.set(f"memascend/digest/{self._rank}", found["digest"])
                come(store, f"memascend/{found['digest']}", self._count)
            if found["digest"] and have_all_come(store, f"memascend/{found['digest']}"):
                return found, []
            if is_over:
                return found, self._apart(found["digest"])
            time.sleep(look_seconds(self._count))

    def _answer_all(self) -> None:
        words = values_of_ranks(self._store, "memascend/word", self._count, each=False)
        if not all(words) or words == self._answered:
            return
        refused = _refusal([json.loads(self._store.get(_about(one))) for one in words])
        digest = hashlib.blake2b(json.dumps(words).encode(), digest_size=8).hexdigest()
        for one in words:
            self._store.set(f"memascend/answer/{one}", json.dumps({"digest": digest, "refused": refused}))
        self._answered = words

    def _apart(self, digest: str) -> list[int]:
        """Returns the missing ranks: ranks without a word, or without the digest `digest`.

        If this rank has no answer although all ranks have a word, rank 0 is missing.
        """
        missing = [
            rank
            for rank, one in enumerate(values_of_ranks(self._store, "memascend/word", self._count, each=True))
            if not one
        ]
        if missing or not digest:
            return missing or [0]
        digests = values_of_ranks(self._store, "memascend/digest", self._count, each=True)
        return [rank for rank, one in enumerate(digests) if one != digest]


def come(store: Any, prefix: str, count: int) -> None:
    """Records that this rank has arrived. The last rank that arrives also records that all ranks have arrived."""
    if store.add(f"{prefix}/came", 1) == count:
        store.set(f"{prefix}/all", "came")


def have_all_come(store: Any, prefix: str) -> bool:
    """True if all ranks have recorded that they arrived."""
    return bool(store.check([f"{prefix}/all"]))


def look_seconds(count: int) -> float:
    """Returns the number of seconds after which a waiting rank looks for a key again, if `count` ranks wait."""
    return LOOK_SECONDS * max(1, count / _LOOKING_MAX)


def values_of_ranks(store: Any, prefix: str, count: int, *, each: bool) -> list[str]:
    """Returns the values that the ranks have written under a prefix, by rank.

    If a rank has written no value, returns "" for all ranks. But if `each` is set, returns "" only for ranks without a
    value. To find these ranks, the function reads each key separately, which is much work for torch's store if many
    ranks do so.
    """
    keys = [f"{prefix}/{rank}" for rank in range(count)]
    if store.check(keys):
        return [value.decode() for value in store.multi_get(keys)]
    return [store.get(key).decode() if each and store.check([key]) else "" for key in keys]


def gone(ranks: Sequence[int], timeout: float, why: str) -> RankError:
    """Returns the error for missing ranks; names no rank if `ranks` is empty, because torch's store did not answer."""
    named = ", ".join(f"rank {rank}" for rank in ranks) or "a rank, or the process of torch's store,"
    return RankError(
        f"{named} is gone, or did not come within {timeout:g} s, so the ranks cannot exchange data; committed steps "
        f"are unchanged: start all ranks again ({why})",
        ranks=tuple(ranks),
    )


def store_failed(error: RuntimeError) -> str:
    """Returns the text for an error of the process group's store."""
    return f"the store of the process group does not answer: {str(error).splitlines()[0][:200]}"


def answered(ask: Callable[[], _Answer], seconds: float) -> _Answer:
    """Calls `ask` on a thread, and waits at most `seconds`.

    `ask` may never return, because the process group's store may be in a process that hangs.

    Raises:
        RuntimeError: `ask` did not return within `seconds`. An error of `ask` is raised as it is.
    """
    answers: list[_Answer] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(ask())
        except BaseException as error:  # noqa: BLE001 - `answered` raises it
            errors.append(error)

    asking = threading.Thread(target=run, daemon=True)
    asking.start()
    asking.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise RuntimeError(f"no answer within {seconds:g} s")
    return answers[0]


def _about(word: str) -> str:
    return f"memascend/about/{word}"


# --- addresses --------------------------------------------------------------------------

_LOOPBACK = "127.0.0.1"
_INTERFACES = "GLOO_SOCKET_IFNAME"
# At most this many ranks are listed in an error about limits of open files.
_NAMED_MAX = 8


def _this_host() -> dict[str, Any]:
    """Describes the host of this process for the other ranks."""
    return {
        "host": _identity(),
        "name": socket.gethostname(),
        "loopback": _loopback(),
        "interface": _interface(),
    }


def _refusal(abouts: Sequence[dict[str, Any]]) -> str:
    """Returns why the ranks cannot connect, or "".

    A reason is that a host would give other hosts a loopback address, which they cannot reach. Another reason is that a
    rank's limit of open files is too low.
    """
    low = [f"rank {rank} on {one['name']}: {one['refused']}" for rank, one in enumerate(abouts) if one.get("refused")]
    if low:
        return f"{'; '.join(low[:_NAMED_MAX])}; nothing was changed"
    # The first rank of each host, by the host's identity.
    hosts: dict[str, tuple[int, dict[str, Any]]] = {}
    for rank, one in enumerate(abouts):
        hosts.setdefault(one["host"], (rank, one))
    apart = [(rank, one) for rank, one in hosts.values() if one["loopback"]]
    if len(hosts) == 1 or not apart:
        return ""
    who = "; ".join(
        f"rank {rank} on {one['name']} would give the address {one['loopback']}: set "
        f"{_INTERFACES}={one['interface']} there"
        for rank, one in apart
    )
    return (
        "the ranks are on several hosts, and a host gives other hosts a loopback address, which they cannot reach. "
        f"gloo uses the address of the first interface in {_INTERFACES}, or else the address of the host's name (see "
        f"/etc/hosts). {who}, or give the host's name an address that other hosts can reach; nothing was changed"
    )


def _identity() -> str:
    """Returns an id of the host, or of the container if the container has a separate network."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return socket.gethostname()


def _loopback() -> str:
    """Returns the address on which gloo groups of this process listen, if it is a loopback address; else ""."""
    named = os.environ.get(_INTERFACES)
    if named:
        return _LOOPBACK if named.split(",")[0] == "lo" else ""
    # Choose the address as torch does: the first address of the host's name that can be bound.
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return _LOOPBACK
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as own:
                own.bind(address)
        except OSError:
            continue
        host = str(address[0]).partition("%")[0]
        return host if ipaddress.ip_address(host).is_loopback else ""
    return _LOOPBACK


def _interface() -> str:
    """Returns the interface of the first route (the default route if one exists); without a route, a description."""
    try:
        return Path("/proc/net/route").read_text(encoding="ascii").splitlines()[1].split()[0]
    except (OSError, IndexError):
        return "the interface that the other hosts reach"


# --- files ------------------------------------------------------------------------------

# The maximum number of gloo groups of all ranks that a run has at once: one for messages, one for rows and gradients,
# and one for a save() or for the first values of new stores. With several replicas, a run has two smaller groups
# instead of the second group.
_GROUPS = 3
# The number of other files that stores, data loaders and other code may open.
_FILES_BESIDE = 128


def _too_few_files(count: int) -> str:
    """Raises this process's limit of open files as far as needed; returns why the limit cannot be raised, or "".

    In each process, a gloo group has one socket for each other rank, and one socket on which it listens.
    """
    need = sum(1 for _ in Path("/proc/self/fd").iterdir()) + _GROUPS * count + _FILES_BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= need:
        return ""
    if hard != resource.RLIM_INFINITY and hard < need:
        return (
            f"with {count} ranks, each process needs about {_GROUPS * count} sockets, and a process may have only "
            f"{hard} files open here: run `ulimit -Hn {need} && ulimit -n {need}` as root before torchrun, or raise "
            "nofile in /etc/security/limits.conf"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
    return ""
