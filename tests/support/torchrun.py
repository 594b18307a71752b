"""Starts ranks as users do: by torchrun, in fresh processes, on this host or on hosts that are network namespaces."""

import contextlib
import os
import subprocess
import sys
import uuid
from pathlib import Path

__all__ = ["Hosts", "environment", "start", "torchrun"]

TESTS = Path(__file__).resolve().parents[1]
# For one run, also on a machine that does ten other things.
SECONDS_MAX = 200


def torchrun(*command, count=2, options=("--standalone",), status=0, **more):
    """Run a script, or `-m` and a module, on so many ranks of this host; the output of all of them."""
    running = start([*options, "--nproc-per-node", str(count)], command, more)
    return finished(running, status)


def start(options, command, more, before=()):
    """A torchrun that is running, with its output in one pipe; `before` is put before the command."""
    return subprocess.Popen(
        [*before, sys.executable, "-m", "torch.distributed.run", *options, *map(str, command)],
        env={**environment(), **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(running, status=0):
    """The output of a torchrun, which is killed with its ranks if it does not end."""
    try:
        output, _ = running.communicate(timeout=SECONDS_MAX)
    except subprocess.TimeoutExpired:
        # torchrun ends its ranks.
        running.terminate()
        output, _ = running.communicate(timeout=60)
        raise AssertionError(f"no end within {SECONDS_MAX} s\n{output}") from None
    assert running.returncode == status, f"status {running.returncode}\n{output}"
    return output


def environment():
    """Of ranks that import what tests share."""
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


class Hosts(contextlib.ExitStack):
    """Two hosts with a cable between them: network namespaces with names, /etc/hosts and a folder of their own.

    Attributes:
        names: of the hosts.
        interfaces: of each host, the name of the one that reaches the other host.
        folders: of each host, the folder that it sees as `own`.
        own: the path of a folder that is another one on each host.
    """

    def __init__(self, folder):
        """Needs root and iproute2."""
        super().__init__()
        with contextlib.ExitStack() as undo:
            self._make(folder, undo)
            self.push(undo.pop_all())

    def _make(self, folder, undo):
        number = uuid.uuid4().hex[:6]
        self.names = [f"ma{number}{letter}" for letter in "ab"]
        self.interfaces = [f"{name}x" for name in self.names]
        self.folders = [folder / letter for letter in "ab"]
        self.own = folder / "own"
        self.own.mkdir()
        for name, own in zip(self.names, self.folders, strict=True):
            own.mkdir()
            ip("netns", "add", name)
            undo.callback(ip, "netns", "del", name)
            # `ip netns exec` puts it over /etc/hosts. As Debian writes it.
            hosts = Path("/etc/netns", name, "hosts")
            hosts.parent.mkdir(parents=True)
            undo.callback(hosts.parent.rmdir)
            hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
            undo.callback(hosts.unlink)
            ip("-n", name, "link", "set", "lo", "up")
        (one, other), (first, second) = self.names, self.interfaces
        ip("link", "add", first, "netns", one, "type", "veth", "peer", "name", second, "netns", other)
        for number, (name, interface) in enumerate(zip(self.names, self.interfaces, strict=True)):
            ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", interface)
            ip("-n", name, "link", "set", interface, "up")

    def address(self, number):
        """Of a host."""
        return f"10.77.0.{number + 1}"

    def torchrun(self, *command, order=(0, 1), status=0, named=False):
        """Run on both hosts; the output of each host.

        Args:
            command: a script, or `-m` and a module, with its arguments.
            order: the hosts, as they are numbered.
            status: of torchrun.
            named: tell gloo the interface.
        """
        running = {}
        with contextlib.ExitStack() as ends:
            for rank, host in enumerate(order):
                running[host] = self._start(command, rank, host, order, named=named)
                ends.callback(running[host].terminate)
            return [finished(running[host], status) for host in range(2)]

    def _start(self, command, rank, host, order, *, named):
        options = [
            "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(rank), "--master-addr",
            self.address(order[0]), "--master-port", "29533",
        ]  # fmt: skip
        more = {"GLOO_SOCKET_IFNAME": self.interfaces[host]} if named else {}
        settle = f'hostname {self.names[host]} && mount --bind "$0" "$1" && shift && exec "$@"'
        before = ["ip", "netns", "exec", self.names[host], "unshare", "-u"]
        before += ["sh", "-c", settle, str(self.folders[host]), str(self.own)]
        return start(options, command, more, before)


def ip(*arguments):
    """Run iproute2's command."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
