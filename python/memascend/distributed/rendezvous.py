"""Lets all ranks agree on fresh keys in torch's store, and rejects hosts whose gloo address no other host reaches."""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import json
import os
import secrets
import socket
import struct
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
    apart: tuple[int, ...] = ()
    try:
        words, apart = answered(lambda: _gathered(store, rank, count, word, timeout), timeout + WORD_SECONDS)
        if not apart:
            _require_reachable([json.loads(store.get(_about(one))) for one in words])
            return f"memascend/{_digest(words)}"
    except RuntimeError as error:
        raise gone((), timeout, store_failed(error)) from error
    raise gone(apart, timeout, "it did not come")


def _gathered(store: Any, rank: int, count: int, word: str, seconds: float) -> tuple[list[str], tuple[int, ...]]:
    """The words of all ranks, and the ranks that did not come in time."""
    store.set(_about(word), json.dumps(_this_host()))
    store.set(f"memascend/word/{rank}", word)
    until, own, asks = time.monotonic() + seconds, "", 0.0
    while True:
        now = time.monotonic()
        # Where some are missing, each key is asked for alone, which is much for the store: the more ranks, the rarer.
        each = now >= min(asks, until)
        if each:
            asks = now + LOOK_SECONDS * count
        words = _values(store, "word", count, each=each)
        if words is not None:
            digest = _digest(words)
            if digest != own:
                own = digest
                store.set(f"memascend/digest/{rank}", own)
            digests = _values(store, "digest", count, each=each)
            apart = tuple(of for of, told in enumerate(digests or ()) if told != own)
            if digests is not None and (now > until or not apart):
                return words, apart
        time.sleep(LOOK_SECONDS)


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
    """Query the store of the process group: it may be in a process that hangs, and then never answers.

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


def _values(store: Any, kind: str, count: int, *, each: bool) -> list[str] | None:
    """What each rank has written; where one has not, None, or with `each` nothing for that rank."""
    keys = [f"memascend/{kind}/{rank}" for rank in range(count)]
    if store.check(keys):
        return [value.decode() for value in store.multi_get(keys)]
    return [store.get(key).decode() if store.check([key]) else "" for key in keys] if each else None


# --- addresses --------------------------------------------------------------------------

_LOOPBACK = "127.0.0.1"
_INTERFACES = "GLOO_SOCKET_IFNAME"
# A request of ioctl: the IPv4 address of an interface, at this offset in a struct of this many bytes.
_SIOCGIFADDR, _IFREQ_BYTES, _ADDRESS_OFFSET = 0x8915, 40, 20
_IFNAME_CHARACTERS_MAX = 15
# An address of documentation, for the interface of the default route: no packet is sent.
_ELSEWHERE = "192.0.2.1"


def _this_host() -> dict[str, Any]:
    """This process's host as the other ranks are told it."""
    return {
        "host": _identity(),
        "name": socket.gethostname(),
        "named": bool(os.environ.get(_INTERFACES)),
        "address": _address_of_gloo(),
        "interface": _interface_to_others(),
    }


def _require_reachable(abouts: Sequence[dict[str, Any]]) -> None:
    """Reject hosts that would tell others a loopback address: the ranks there would wait for each other in vain."""
    if len({one["host"] for one in abouts}) == 1:
        return
    # The first rank of each such host.
    apart: dict[str, tuple[int, dict[str, Any]]] = {}
    for rank, one in enumerate(abouts):
        if ipaddress.ip_address(one["address"]).is_loopback:
            apart.setdefault(one["host"], (rank, one))
    if not apart:
        return
    who = "; ".join(
        f"rank {rank} on {one['name']} would give the address {one['address']}: set "
        f"{_INTERFACES}={one['interface'] or 'the interface that the other hosts reach'} there"
        for rank, one in apart.values()
    )
    if any(one["named"] for _, one in apart.values()):
        why = f"the interface that {_INTERFACES} names first, which is a loopback interface"
    else:
        why = "the name of its host, which is a loopback address (see /etc/hosts)"
    raise ConfigError(
        f"the ranks are on several hosts, and gloo gives the others the address of {why}. {who}, or let the host's "
        "name have an address that the others reach; nothing was changed"
    )


def _identity() -> str:
    """Identifies the host, or the container with a network of its own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return socket.gethostname()


def _address_of_gloo() -> str:
    """The address at which a gloo group of this process waits for other ranks, as torch chooses it."""
    named = os.environ.get(_INTERFACES)
    if named:
        return _address_of(named.split(",")[0]) or _ELSEWHERE
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
        return str(address[0]).partition("%")[0]
    return _LOOPBACK


def _address_of(interface: str) -> str | None:
    """The IPv4 address of an interface, if it has one."""
    asked = interface.encode()[:_IFNAME_CHARACTERS_MAX].ljust(_IFREQ_BYTES, b"\0")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            told = fcntl.ioctl(any_socket, _SIOCGIFADDR, asked)
    except OSError:
        return None
    return socket.inet_ntoa(struct.unpack_from("4s", told, _ADDRESS_OFFSET)[0])


def _interface_to_others() -> str | None:
    """The interface through which this host reaches the one that torchrun names as the first, or any other."""
    try:
        addresses = {_address_of(name): name for _, name in socket.if_nameindex()}
    except OSError:
        return None
    others = [name for address, name in addresses.items() if address and not ipaddress.ip_address(address).is_loopback]
    for target in (os.environ.get("MASTER_ADDR"), _ELSEWHERE):
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
                own.connect((target, 1))
                found = addresses.get(own.getsockname()[0])
        except (OSError, UnicodeError, TypeError):
            continue
        if found in others:
            return found
    return others[0] if others else None
