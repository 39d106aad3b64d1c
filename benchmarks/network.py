"""Hosts with slow links, inside one Linux machine: network namespaces on a shaped bridge.

Each host is a namespace of its own with one interface, eth0, which is a veth to a port of a bridge
(in one more namespace). A token bucket shapes both ends: what the host sends, at its eth0, and what
it receives, at its port. So a link is full duplex with `rate` each way, as a network card is. The
machine's own network is not touched, and from within there is no way out of it.
"""

import json
import os
import re
import shutil
import subprocess

from megatron_tsp.errors import TSPError

#: In the token bucket. Larger than one send that the kernel leaves unsegmented (64 KiB).
BURST = "128kb"
#: Bytes that may queue at an end before it drops: above what TCP has in flight.
QUEUE = "16mb"
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}


class Network:
    """`hosts` namespaces; a context manager. `names` and `addresses` have one entry a host.

    Raises on entry:
        TSPError: not root, no iproute2, or a kernel without a part of this: with the command and
            its error. What was made by then is removed.
    """

    def __init__(self, hosts: int, rate: str):
        self.rate = rate
        self.bits_per_s = parse_rate(rate)
        self.hub = f"tsp{os.getpid()}-hub"
        self.names = [f"tsp{os.getpid()}-{host}" for host in range(hosts)]
        self.addresses = [f"10.77.0.{host + 1}" for host in range(hosts)]
        self.made: list[str] = []

    def __enter__(self) -> "Network":
        if os.geteuid() != 0:
            raise TSPError("network namespaces need root: run this as root (sudo)")
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise TSPError(f"no `{tool}` on this machine: install iproute2")
        try:
            self._add(self.hub)
            _call(f"ip -n {self.hub} link add br0 type bridge")
            _call(f"ip -n {self.hub} link set br0 up")
            for host, name in enumerate(self.names):
                self._host(host, name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _add(self, name: str) -> None:
        _call(f"ip netns add {name}")
        self.made.append(name)

    def _host(self, host: int, name: str) -> None:
        hub, port = self.hub, f"port{host}"
        self._add(name)
        _call(f"ip -n {hub} link add {port} type veth peer name eth0 netns {name}")
        _call(f"ip -n {hub} link set {port} master br0 up")
        _call(f"ip -n {name} addr add {self.addresses[host]}/24 dev eth0")
        for device in ("lo", "eth0"):
            _call(f"ip -n {name} link set {device} up")
        for where, device in ((name, "eth0"), (hub, port)):
            _call(
                f"tc -n {where} qdisc replace dev {device} root tbf "
                f"rate {self.rate} burst {BURST} limit {QUEUE}"
            )

    def sent(self) -> list[int]:
        """Bytes that each host's eth0 has sent since it was made, frame headers included."""
        totals = []
        for name in self.names:
            [link] = json.loads(_call(f"ip -n {name} -json -statistics link show dev eth0"))
            totals.append(link["stats64"]["tx"]["bytes"])
        return totals

    def dropped(self) -> int:
        """Packets that the token buckets of all links have dropped so far."""
        places = [(self.hub, f"port{host}") for host in range(len(self.names))]
        places += [(name, "eth0") for name in self.names]
        total = 0
        for where, device in places:
            [qdisc] = json.loads(_call(f"tc -n {where} -json -statistics qdisc show dev {device}"))
            total += qdisc["drops"]
        return total

    def __exit__(self, *exception) -> None:
        """Remove the namespaces, and with them their links."""
        while self.made:
            subprocess.run(["ip", "netns", "delete", self.made.pop()], check=False)


def parse_rate(rate: str) -> float:
    """'500mbit' as bits per second."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", rate)
    if not found or not float(found[1]):
        raise TSPError(f"--rate {rate!r}: expected a number with kbit, mbit or gbit, like 500mbit")
    return float(found[1]) * _UNITS[found[2]]


def _call(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise TSPError(f"`{command}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout
