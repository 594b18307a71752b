"""Lets all ranks agree on fresh keys in torch's store, and rejects hosts whose gloo address no other host reaches."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
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
# How often a rank that waits for others looks for their keys.
LOOK_SECONDS = 0.01
# How long to wait for the reason of a rank that may just have left; a dead rank leaves none.
WORD_SECONDS = 0.5


def meet(store: Any, rank: int, count: int, timeout: float) -> str:
    """Agree with all ranks on a prefix for keys that no other attempt of the run has used; all ranks do so together.

    torchrun keeps its store when it restarts the processes, so that the keys of the attempt before are still there. So
    each rank writes a word that it draws now, and then a digest of the words of all. When the digests of all ranks are
    equal, each of them contains the present word of each rank.

    Raises:
        RankError: a rank did not come; the error names it.
        ConfigError: a host of several would tell the others an address that only itself can reach.
    """
    word = secrets.token_hex(8)
    apart: list[int] = []
    try:
        words, apart = answered(lambda: _gathered(store, rank, count, word, timeout), timeout + WORD_SECONDS)
        if not apart:
            _require_reachable([json.loads(store.get(_about(one))) for one in words])
            return f"memascend/{_digest(words)}"
    except RuntimeError as error:
        raise gone((), timeout, store_failed(error)) from error
    raise gone(apart, timeout, "it did not come")


def _gathered(store: Any, rank: int, count: int, word: str, seconds: float) -> tuple[list[str], list[int]]:
    """The words of all ranks, and the ranks that did not come in time."""
    store.set(_about(word), json.dumps(_this_host()))
    store.set(f"memascend/word/{rank}", word)
    until, own = time.monotonic() + seconds, ""
    while True:
        is_over = time.monotonic() > until
        words = values_of_ranks(store, "memascend/word", count, each=is_over)
        apart = [rank for rank, one in enumerate(words) if not one]
        if not apart:
            digest = _digest(words)
            if digest != own:
                own = digest
                store.set(f"memascend/digest/{rank}", own)
            digests = values_of_ranks(store, "memascend/digest", count, each=is_over)
            apart = [rank for rank, one in enumerate(digests) if one != own]
        if is_over or not apart:
            return words, apart
        time.sleep(LOOK_SECONDS)


def values_of_ranks(store: Any, prefix: str, count: int, *, each: bool) -> list[str]:
    """What each rank has written under a prefix, or "".

    As long as a rank has written nothing, all are "" unless `each` asks for every key by itself, which is much for the
    store if many ranks do so again and again.
    """
    keys = [f"{prefix}/{rank}" for rank in range(count)]
    if store.check(keys):
        return [value.decode() for value in store.multi_get(keys)]
    return [store.get(key).decode() if each and store.check([key]) else "" for key in keys]


def gone(ranks: Sequence[int], timeout: float, why: str) -> RankError:
    """The error of ranks that are missing before all can talk."""
    named = ", ".join(f"rank {rank}" for rank in ranks) or "a rank"
    return RankError(
        f"{named} is gone, or did not come within {timeout:g} s, before all ranks could talk; nothing was changed "
        f"({why})",
        ranks=tuple(ranks),
    )


def store_failed(error: RuntimeError) -> str:
    """The reason if the store of the process group fails."""
    return f"the store of the process group does not answer: {str(error).splitlines()[0][:200]}"


def answered(ask: Callable[[], _Answer], seconds: float) -> _Answer:
    """Call `ask` on a thread: the store of the process group may be in a process that hangs, and then never answers.

    Raises:
        RuntimeError: it failed, or did not answer within `seconds`.
    """
    answers: list[_Answer] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(ask())
        except BaseException as error:  # noqa: BLE001 - it is raised where it was asked
            errors.append(error)

    asking = threading.Thread(target=run, daemon=True)
    asking.start()
    asking.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise RuntimeError(f"no answer within {seconds:g} s")
    return answers[0]


def _digest(words: Sequence[str]) -> str:
    return hashlib.blake2b(json.dumps(words).encode(), digest_size=8).hexdigest()


def _about(word: str) -> str:
    return f"memascend/about/{word}"


# --- addresses --------------------------------------------------------------------------

_LOOPBACK = "127.0.0.1"
_INTERFACES = "GLOO_SOCKET_IFNAME"


def _this_host() -> dict[str, Any]:
    """The host of this process, as the other ranks learn of it."""
    return {
        "host": _identity(),
        "name": socket.gethostname(),
        "loopback": _loopback(),
        "interface": _interface(),
    }


def _require_reachable(abouts: Sequence[dict[str, Any]]) -> None:
    """Reject hosts that would tell others a loopback address: the ranks there would wait for each other in vain."""
    # The first rank of each host.
    hosts: dict[str, tuple[int, dict[str, Any]]] = {}
    for rank, one in enumerate(abouts):
        hosts.setdefault(one["host"], (rank, one))
    apart = [(rank, one) for rank, one in hosts.values() if one["loopback"]]
    if len(hosts) == 1 or not apart:
        return
    who = "; ".join(
        f"rank {rank} on {one['name']} would give the address {one['loopback']}: set "
        f"{_INTERFACES}={one['interface']} there"
        for rank, one in apart
    )
    raise ConfigError(
        "the ranks are on several hosts, and gloo gives the others the address of the interface that "
        f"{_INTERFACES} names first, or else of the host's name (see /etc/hosts), which is a loopback address here. "
        f"{who}, or let the host's name have an address that the others reach; nothing was changed"
    )


def _identity() -> str:
    """Identifies the host, or the container with a network of its own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return socket.gethostname()


def _loopback() -> str:
    """The address at which a gloo group of this process waits for others, if it is a loopback address; else ""."""
    named = os.environ.get(_INTERFACES)
    if named:
        return _LOOPBACK if named.split(",")[0] == "lo" else ""
    # As torch chooses it: the first address of the host's name that can be bound.
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
    """The interface of the first route, which is the default route if there is one."""
    try:
        return Path("/proc/net/route").read_text(encoding="ascii").splitlines()[1].split()[0]
    except (OSError, IndexError):
        return "the interface that the other hosts reach"
