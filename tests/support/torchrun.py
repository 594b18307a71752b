"""Starts ranks with torchrun in fresh processes, on this host or on several hosts that network namespaces simulate."""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path

from support.lives import Running

__all__ = ["CONFIG", "Hosts", "as_if_on_gpus", "command"]

# accelerate's configuration, as docs/gpus.md shows it.
CONFIG = """
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
"""


def command(*words, count=2, options=()):
    """Returns the command that starts `words` on `count` ranks of this host.

    `words` are a script, or `-m` and the name of a module, and the arguments.
    """
    start = ("-m", "torch.distributed.run", "--standalone", *options, "--nproc-per-node", count)
    return [sys.executable, *start, *words]


def as_if_on_gpus():
    """Patches accelerate in this process so that it shards models on the CPU.

    Unpatched, accelerate shards only on GPUs.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "1")
    os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
    begin = PartialState.__init__

    def begun(self, *values, **options):
        begin(self, *values, **options)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = begun


class Hosts(contextlib.ExitStack):
    """Simulated hosts on one network switch, with the host names host0, host1 and so on.

    Each host is a network namespace with an interface eth0. All hosts share /mnt/shared; each host has separate folders
    /mnt/nvme0 and /mnt/nvme1. Every host resolves the names of all hosts.
    """

    SHARED = "shared"
    DRIVES = ("nvme0", "nvme1")

    def __init__(self, folder, count=2):
        """Sets up the hosts, which needs root and iproute2. `folder` stores the files of /mnt on each host."""
        super().__init__()
        self.folder = folder
        self.count = count
        self._outputs = itertools.count()
        self._number = uuid.uuid4().hex[:6]
        with contextlib.ExitStack() as undo:
            self._make(undo)
            self.push(undo.pop_all())

    def _namespace(self, host):
        return f"mahosts{self._number}-{host}"

    def _etc(self, host):
        return Path("/etc/netns", self._namespace(host))

    def _make(self, undo):
        switch = self._namespace("switch")
        ip("netns", "add", switch)
        undo.callback(ip, "netns", "del", switch)
        ip("-n", switch, "link", "add", "switch", "type", "bridge")
        ip("-n", switch, "link", "set", "switch", "up")
        for host in range(self.count):
            name = self._namespace(host)
            ip("netns", "add", name)
            undo.callback(ip, "netns", "del", name)
            undo.callback(self.kill, host)
            # `ip netns exec` mounts the files of this folder over the files of /etc.
            self._etc(host).mkdir(parents=True)
            undo.callback(shutil.rmtree, self._etc(host))
            self.name_hosts(host)
            # The hosts look up names in /etc/hosts only, because no DNS server answers in a namespace.
            (self._etc(host) / "nsswitch.conf").write_text("hosts: files\n")
            cable = ["link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"port{host}"]
            ip(*cable, "netns", switch)
            ip("-n", switch, "link", "set", f"port{host}", "master", "switch", "up")
            ip("-n", name, "addr", "add", f"{_address(host)}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
            self.connect(host, "up")
            for drive in self.DRIVES:
                (self.folder / f"host{host}" / drive).mkdir(parents=True)
        (self.folder / self.SHARED).mkdir()

    def name_hosts(self, host, *, as_debian=False):
        """Writes /etc/hosts of a host. With `as_debian`, the host's own name has a loopback address, as on Debian."""
        lines = [f"{_address(other)} host{other}" for other in range(self.count) if other != host or not as_debian]
        own = [f"127.0.1.1 host{host}"] if as_debian else []
        (self._etc(host) / "hosts").write_text("\n".join(["127.0.0.1 localhost", *own, *lines, ""]))

    def connect(self, host, state):
        """Plugs a host's network cable in (state "up"), or pulls it ("down")."""
        ip("-n", self._namespace(host), "link", "set", "eth0", state)

    def folder_of(self, host, name):
        """Returns the folder that a host mounts at /mnt/NAME."""
        return self.folder / (name if name == self.SHARED else f"host{host}/{name}")

    def start(self, host, line, **more):
        """Starts a shell command line on a host, in the folder /mnt/shared; returns the `Running` of the command."""
        mounts = [f"mount --bind {self.folder_of(host, name)} /mnt/{name}" for name in (self.SHARED, *self.DRIVES)]
        folders = " ".join(f"/mnt/{name}" for name in (self.SHARED, *self.DRIVES))
        settle = [f"hostname host{host}", "mount -t tmpfs none /mnt", f"mkdir {folders}", *mounts, "cd /mnt/shared"]
        command = ["ip", "netns", "exec", self._namespace(host), "unshare", "-um"]
        command += ["sh", "-c", " && ".join([*settle, 'exec bash -c "$0"']), line]
        # PATH begins with the folder of this interpreter, as in an active virtual environment. The commands `torchrun`
        # and `python` then come from this folder.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        running = Running(command, self.folder / f"output-{next(self._outputs)}", **{"PATH": path, **more})
        self.callback(running.kill)
        return running

    def ranks(self, host):
        """Returns the pids of the ranks that run on a host, by rank."""
        found = {}
        for pid in ip("netns", "pids", self._namespace(host)).split():
            with contextlib.suppress(OSError):
                variables = Path("/proc", pid, "environ").read_bytes().split(b"\0")
                rank = [one[5:] for one in variables if one.startswith(b"RANK=")]
                if rank:
                    found[int(rank[0])] = int(pid)
        return found

    def kill(self, host):
        """Kills every process on a host."""
        for pid in ip("netns", "pids", self._namespace(host)).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _address(host):
    return f"10.77.0.{host + 1}"


def ip(*arguments):
    """Runs iproute2's `ip`; returns its output."""
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
