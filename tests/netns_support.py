# SPDX-License-Identifier: Apache-2.0
"""Several "hosts" on one machine: network namespaces, an `ssh` that enters them, and their counters.

Two are joined by a veth pair; more by a bridge, which has a namespace of its own, and whose rate can be limited.

A namespace lives as long as a process in it. The one that holds it reads from a pipe of the test, so that a test that
is killed leaves nothing behind. Without root a user namespace is made around all.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

LINK = "tf0"  # the interface in both
ADDRESSES = ("10.77.0.1", "10.77.0.2")
MTU = 9000
# Ethernet 14, IPv4 20, TCP 20 and its time stamps 12.
HEADER_BYTES = 66
BRIDGE = "bridge"
QUEUE_S = 0.2  # of frames that wait for a limited rate, before one is dropped
BURST_S = 0.002  # of frames at full speed after a pause; a timer may come that late

# As sshd does: a clean environment and a terminal of its own, whose end is a hang-up for those on the other side.
SSH = """#!{python} -SE
import os, pty, sys

enter = {enter}
host, command = sys.argv[-2:]
pid, master = pty.fork()
if pid == 0:
    kept = {{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}}
    os.execvpe(enter[host][0], [*enter[host], "sh", "-c", command], {{**kept, "TERM": "dumb"}})
while True:
    try:
        data = os.read(master, 65536)
    except OSError:
        break
    if not data:
        break
    while data:
        data = data[os.write(1, data):]
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
sys.exit(code if code >= 0 else 255)
"""


@dataclass(frozen=True)
class Counters:
    """What an interface has sent since it was made."""

    bytes: int
    packets: int

    def __sub__(self, other: Counters) -> Counters:
        return Counters(self.bytes - other.bytes, self.packets - other.packets)

    def __add__(self, other: Counters) -> Counters:
        return Counters(self.bytes + other.bytes, self.packets + other.packets)

    @property
    def payload_bytes(self) -> int:
        """Without the headers of its packets."""
        return self.bytes - HEADER_BYTES * self.packets


@dataclass(frozen=True)
class NetHost:
    """A namespace with an address of its own."""

    address: str
    holder: int  # the process that keeps it

    def enter(self) -> list[str]:
        """Words before a command that let it run there."""
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        return ["nsenter", f"--target={self.holder}", *user, "--net", "--uts"]

    def run(self, *words: str) -> str:
        """What a command there writes."""
        return subprocess.run([*self.enter(), *words], check=True, capture_output=True, text=True, timeout=30).stdout

    def sent(self, interface: str = LINK) -> Counters:
        """Of the interface, as the kernel counts."""
        for line in Path(f"/proc/{self.holder}/net/dev").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name.strip() == interface:
                numbers = [int(word) for word in rest.split()]
                return Counters(numbers[8], numbers[9])
        raise LookupError(interface)

    def pids(self) -> list[int]:
        """All processes there but the one that keeps it."""
        mine, found = os.readlink(f"/proc/{self.holder}/ns/net"), []
        for name in os.listdir("/proc"):
            with suppress(OSError):
                if name.isdigit() and int(name) != self.holder and os.readlink(f"/proc/{name}/ns/net") == mine:
                    found.append(int(name))
        return found

    def kill_all(self) -> int:
        """SIGKILL to all processes there, until none is left; how many there were."""
        killed: set[int] = set()
        while pids := [pid for pid in self.pids() if not has_ended(pid)]:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed.update(pids)
            time.sleep(0.01)
        return len(killed)


def has_ended(pid: int) -> bool:
    """Whether nothing of the process runs any more, even if nobody has asked for its status yet."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return True


@contextmanager
def two_hosts(mtu: int = MTU) -> Iterator[tuple[NetHost, NetHost]]:
    """Two namespaces that reach each other. Packets are counted as a card would send them: none above the MTU."""
    with ExitStack() as stack:
        first, second = _hold_all(stack, 2)
        hosts = (NetHost(ADDRESSES[0], first), NetHost(ADDRESSES[1], second))
        for host in hosts:
            stack.callback(host.kill_all)
        hosts[0].run("ip", "link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", str(hosts[1].holder))
        _set_up(hosts, mtu)
        yield hosts


@dataclass(frozen=True)
class Switch:
    """Hosts on one bridge."""

    hosts: tuple[NetHost, ...]
    middle: NetHost  # where the bridge is, with a port for each host

    def limit(self, mbit: float) -> None:
        """To and from each host at most so many Mbit/s, headers included."""
        rate = mbit * 1e6 / 8
        burst = max(64_000, round(rate * BURST_S))
        shape = ["rate", f"{round(mbit * 1e6)}bit", "burst", str(burst), "limit", str(burst + round(rate * QUEUE_S))]
        for number, host in enumerate(self.hosts):
            host.run("tc", "qdisc", "replace", "dev", LINK, "root", "tbf", *shape)
            self.middle.run("tc", "qdisc", "replace", "dev", f"port{number}", "root", "tbf", *shape)


@contextmanager
def hosts_on_switch(num_hosts: int, mbit: float | None = None, mtu: int = MTU) -> Iterator[Switch]:
    """As many namespaces on one bridge, with the addresses 10.77.0.1 and on; None: at any rate."""
    with ExitStack() as stack:
        middle, *holders = _hold_all(stack, num_hosts + 1)
        hosts = tuple(NetHost(f"10.77.0.{number + 1}", holder) for number, holder in enumerate(holders))
        switch = Switch(hosts, NetHost("", middle))
        for host in hosts:
            stack.callback(host.kill_all)
        switch.middle.run("ip", "link", "add", BRIDGE, "type", "bridge")
        switch.middle.run("ip", "link", "set", BRIDGE, "up")
        for number, host in enumerate(hosts):
            port = f"port{number}"
            words = ["type", "veth", "peer", "name", LINK, "netns", str(host.holder)]
            switch.middle.run("ip", "link", "add", port, *words)
            switch.middle.run("ip", "link", "set", port, "mtu", str(mtu), "gso_max_segs", "1", "master", BRIDGE, "up")
        _set_up(hosts, mtu)
        if mbit is not None:
            switch.limit(mbit)
        yield switch


def _set_up(hosts: tuple[NetHost, ...], mtu: int) -> None:
    """Names, addresses and interfaces of hosts that have a link each."""
    for number, host in enumerate(hosts):
        host.run("hostname", f"host-{number}")  # a name that nobody can resolve
        host.run("ip", "address", "add", f"{host.address}/24", "dev", LINK)
        host.run("ip", "link", "set", LINK, "mtu", str(mtu), "gso_max_segs", "1")
        host.run("ip", "link", "set", LINK, "up")
        host.run("ip", "link", "set", "lo", "up")


def _hold_all(stack: ExitStack, num: int) -> list[int]:
    """The processes that keep as many namespaces; without root all are in one user namespace."""
    first = _hold(stack, [] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user"])
    joined = [] if os.geteuid() == 0 else ["nsenter", f"--target={first}", "--user", "--preserve-credentials"]
    return [first, *(_hold(stack, joined) for _ in range(num - 1))]


def _hold(stack: ExitStack, words: list[str]) -> int:
    command = [*words, "--net", "--uts", "cat"] if "unshare" in words else [*words, "unshare", "--net", "--uts", "cat"]
    holder = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE))
    stack.callback(holder.kill)
    ours, deadline_s = os.readlink("/proc/self/ns/net"), time.monotonic() + 10
    while True:
        with suppress(OSError):
            comm = Path(f"/proc/{holder.pid}/comm").read_text().strip()
            if comm == "cat" and os.readlink(f"/proc/{holder.pid}/ns/net") != ours:
                return holder.pid
        if holder.poll() is not None or time.monotonic() > deadline_s:
            assert holder.stderr is not None
            said = holder.stderr.read().decode().strip() if holder.poll() is not None else "no namespace after 10 s"
            raise OSError(f"{command}: {said}")
        time.sleep(0.01)


def why_not() -> str:
    """Why two hosts cannot be made here; nothing where they can."""
    return _reason(two_hosts())


def why_no_switch(num_hosts: int, mbit: float | None) -> str:
    """Why hosts on a bridge, with a limit of the rate if one is given, cannot be made here; nothing where they can."""
    return _reason(hosts_on_switch(num_hosts, mbit))


def _reason(made: AbstractContextManager[object]) -> str:
    if sys.platform != "linux":
        return "network namespaces need Linux"
    try:
        with made:
            return ""
    except subprocess.CalledProcessError as error:
        return f"{error.cmd}: {error.stderr.strip()}"
    except OSError as error:
        return str(error)


def write_ssh(folder: Path, hosts: tuple[NetHost, ...]) -> Path:
    """An `ssh` for the PATH that enters the namespace of a host by its address."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "ssh"
    path.write_text(SSH.format(python=sys.executable, enter=json.dumps({host.address: host.enter() for host in hosts})))
    path.chmod(0o755)
    return path
