"""Machines: profiles in YAML, and how long their links take for a collective.

A profile is one file in `hardware/`, or the user's own. Every number is ``{value, source}``: where
it comes from, or that it is an assumption. Bandwidths are per device and one way, in GB/s (1e9
bytes a second); times in microseconds.
"""

import math
import os
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import yaml

from megatron_tsp.ab.config import OnlyOnce, nearest
from megatron_tsp.ab.config import load as load_yaml
from megatron_tsp.errors import TSPError

FOLDER = resources.files("megatron_tsp.plan") / "hardware"

#: Key: (unit, what it is).
NUMBERS = {
    "memory": ("GiB", "a device's memory"),
    "reserve": ("GiB", "of it that training cannot have: context, workspaces, fragmentation"),
    "matmul": ("TFLOP/s", "peak of dense matrix products, at the profile's precision"),
    "memory_bandwidth": ("GB/s", "of a device's memory"),
    "link": ("GB/s", "one way: `mesh`, of one link between two devices; `switch`, of a device"),
    "links": ("", "`mesh`: links of a device to others of its node; `switch`: 1"),
    "link_latency": ("us", "of a hop inside a node"),
    "nic": ("GB/s", "one way, of a device's share of the network between nodes"),
    "nic_latency": ("us", "of a hop between nodes"),
    "kernel_latency": ("us", "of a kernel, however small"),
    "matmul_efficiency": ("", "share of the peak that large products reach"),
    "attention_efficiency": ("", "share of the peak that flash attention reaches, forward"),
    "attention_backward_efficiency": ("", "the same, backward"),
    "memory_efficiency": ("", "share of the memory bandwidth that elementwise kernels reach"),
    "link_efficiency": ("", "share of the links that collectives reach"),
    "nic_efficiency": ("", "share of the network that collectives reach"),
}
#: Measured instead of derived from the links: seconds = latency + bytes sent/bandwidth.
COLLECTIVES = (
    "all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "all_to_all", "send"
)  # fmt: skip
_SHARES = tuple(name for name in NUMBERS if name.endswith("efficiency"))
_REQUIRED = {"name", "devices_per_node", "fabric", "precision", *NUMBERS}
_OPTIONAL = {"price", "measured", "overlap", "note"}


@dataclass(frozen=True)
class Hardware:
    """A machine: nodes of devices.

    Attributes:
        name, note: what it is.
        devices_per_node: devices that share a fabric.
        fabric: "mesh", a link to each of `links` others; "switch", every device at full bandwidth.
        precision: of `matmul`: "bf16" or "fp32".
        overlap: transfers and kernels go on at the same time.
        price: USD for a device-hour, or None.
        numbers: `NUMBERS`, in their units.
        sources: where each comes from.
        measured: {collective: {ranks: (seconds, bytes a second)}}, bytes as `traffic` counts them.
    """

    name: str
    devices_per_node: int
    fabric: str
    precision: str
    numbers: dict[str, float]
    sources: dict[str, str]
    overlap: bool = True
    price: float | None = None
    note: str = ""
    measured: dict[str, dict[int, tuple[float, float]]] = field(default_factory=dict)

    __hash__ = object.__hash__

    # -----------------------------------------------------------------------------------------
    # Compute, in seconds
    # -----------------------------------------------------------------------------------------

    def matmul(self, flops: float, size: float) -> float:
        """A matrix product of `flops` that reads and writes `size` bytes."""
        n = self.numbers
        rate = n["matmul"] * 1e12 * n["matmul_efficiency"]
        return n["kernel_latency"] * 1e-6 + max(flops / rate, size / self._memory_rate())

    def attention(self, flops: float, backward: bool = False) -> float:
        """Flash attention of `flops`."""
        n = self.numbers
        share = n["attention_backward_efficiency" if backward else "attention_efficiency"]
        return n["kernel_latency"] * 1e-6 + flops / (n["matmul"] * 1e12 * share)

    def elementwise(self, size: float) -> float:
        """Kernels that read and write `size` bytes in all."""
        return self.numbers["kernel_latency"] * 1e-6 + size / self._memory_rate()

    def _memory_rate(self) -> float:
        return self.numbers["memory_bandwidth"] * 1e9 * self.numbers["memory_efficiency"]

    @property
    def usable_memory(self) -> float:
        """Bytes that training may use."""
        return (self.numbers["memory"] - self.numbers["reserve"]) * 2**30

    # -----------------------------------------------------------------------------------------
    # Links
    # -----------------------------------------------------------------------------------------

    def transfer(self, collective: str, sent: float, ranks: int, stride: int = 1) -> float:
        """Seconds of one collective.

        Args:
            collective: a name of `COLLECTIVES`.
            sent: bytes that each rank sends, as `traffic` counts them.
            ranks: of the group.
            stride: distance of its ranks in the world.
        """
        if ranks == 1 or not sent:
            return 0.0
        inside = self.neighbours(ranks, stride)
        if self.measured and inside == ranks:
            latency, rate = _nearest(self.measured[collective], ranks)
            return latency + sent / rate
        n, crosses = self.numbers, inside < ranks
        rounds = 1 if collective in ("send", "all_to_all") else math.ceil(math.log2(ranks))
        latency = n["nic_latency" if crosses else "link_latency"] * 1e-6 * rounds
        link = n["link"] * 1e9 * n["link_efficiency"]
        nic = n["nic"] * 1e9 * n["nic_efficiency"]
        if collective == "send":
            return latency + sent / (nic if crosses else link)
        if self.fabric == "mesh":
            link *= min(max(inside - 1, 1), n["links"])
        outside = (ranks - inside) / (ranks - 1)  # of what a rank sends, if it sends to all alike
        if collective == "all_to_all":
            return latency + max(sent * outside / nic, sent * (1 - outside) / link)
        if collective in ("broadcast", "reduce"):
            # The root sends the whole, once, and the others pass it on while it arrives.
            whole = sent * ranks / (ranks - 1)
            return latency + whole / (min(link, nic * inside) if crosses else link)
        # What comes from other nodes enters a node once, over the network cards of its ranks.
        return latency + max(sent * outside / inside / nic, sent / link if inside > 1 else 0.0)

    def neighbours(self, ranks: int, stride: int) -> int:
        """How many ranks of a group share a node."""
        if ranks * stride <= self.devices_per_node:
            return ranks
        return max(1, self.devices_per_node // stride)


def _nearest(table: dict[int, tuple[float, float]], ranks: int) -> tuple[float, float]:
    """What was measured with the number of ranks that is nearest."""
    return table[min(table, key=lambda n: abs(math.log(n / ranks)))]


# ---------------------------------------------------------------------------------------------
# Profiles
# ---------------------------------------------------------------------------------------------


def names() -> list[str]:
    """The profiles that come with this package."""
    return sorted(path.name[:-5] for path in FOLDER.iterdir() if path.name.endswith(".yaml"))


def load(name: str) -> Hardware:
    """The profile of this name, or in this YAML file.

    Raises:
        TSPError: no such profile or file, not YAML, a key missing or unknown, a number without
            value or source or out of range.
    """
    if name.endswith((".yaml", ".yml")) or os.sep in name:
        path = Path(name)
        if not path.is_file():
            raise TSPError(f"--hardware {name}: no such file")
    elif name in names():
        path = FOLDER / f"{name}.yaml"
    else:
        raise TSPError(
            f"--hardware {name}: no such profile{nearest(name, names())}; a file ends in .yaml"
        )
    return _read(load_yaml(path, "profile", _Loader), str(path))


class _Loader(OnlyOnce, yaml.SafeLoader):
    """Numbers are numbers."""


def _read(content, where: str) -> Hardware:
    if not isinstance(content, dict):
        raise TSPError(f"{where}: expected `key: value` lines")
    for key in content:
        if key not in _REQUIRED | _OPTIONAL:
            near = nearest(str(key), sorted(_REQUIRED | _OPTIONAL))
            raise TSPError(f"{where}: unknown key {key!r}{near}")
    if missing := sorted(_REQUIRED - content.keys()):
        raise TSPError(f"{where}: missing {', '.join(missing)}")
    for key, valid in (("fabric", ("mesh", "switch")), ("precision", ("bf16", "fp32"))):
        if content[key] not in valid:
            raise TSPError(f"{where}: {key} {content[key]!r}: not one of {', '.join(valid)}")
    if not isinstance(content["name"], str) or not content["name"].strip():
        raise TSPError(f"{where}: name {content['name']!r}: expected what the machine is called")
    devices = content["devices_per_node"]
    if type(devices) is not int or devices < 1:
        raise TSPError(f"{where}: devices_per_node {devices!r}: expected a whole number from 1")
    if not isinstance(content.get("overlap", True), bool):
        raise TSPError(f"{where}: overlap {content['overlap']!r}: expected true or false")
    numbers, sources = {}, {}
    for key in (*NUMBERS, *(("price",) if "price" in content else ())):
        numbers[key], sources[key] = _number(content[key], f"{where}: {key}")
        if key in _SHARES and numbers[key] > 1:
            raise TSPError(f"{where}: {key} {numbers[key]}: a share is at most 1")
    if numbers["reserve"] >= numbers["memory"]:
        raise TSPError(f"{where}: a reserve of {numbers['reserve']:g} GiB leaves no memory")
    return Hardware(
        name=content["name"],
        devices_per_node=devices,
        fabric=content["fabric"],
        precision=content["precision"],
        price=numbers.pop("price", None),
        numbers=numbers,
        sources=sources,
        overlap=content.get("overlap", True),
        note=str(content.get("note", "")),
        measured=_measured(content.get("measured"), where),
    )


def _number(entry, where: str) -> tuple[float, str]:
    """(value, source) of {value, source}."""
    if not isinstance(entry, dict) or entry.keys() != {"value", "source"}:
        raise TSPError(f"{where}: expected {{value: a number, source: where it is from}}")
    value, source = entry["value"], entry["source"]
    if not _is_number(value) or (value == 0 and not where.endswith("reserve")):
        raise TSPError(f"{where}: value {value!r}: expected a number above 0{_spelling(value)}")
    if not isinstance(source, str) or not source.strip():
        raise TSPError(f"{where}: source is empty: say where {value} is from")
    return float(value), source


def _is_number(value) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _spelling(value) -> str:
    """YAML takes 1e3 for a word."""
    try:
        return f"; YAML spells it {float(value)!r}" if isinstance(value, str) else ""
    except ValueError:
        return ""


def _measured(entry, where: str) -> dict[str, dict[int, tuple[float, float]]]:
    if entry is None:
        return {}
    where = f"{where}: measured"
    if not isinstance(entry, dict) or set(entry) != set(COLLECTIVES):
        raise TSPError(f"{where}: expected each of {', '.join(COLLECTIVES)}, and no other key")
    result: dict[str, dict[int, tuple[float, float]]] = {}
    for collective, table in entry.items():
        if not isinstance(table, dict) or not table:
            raise TSPError(f"{where}: {collective}: expected `ranks: {{latency, bandwidth}}` lines")
        for ranks, pair in table.items():
            at = f"{where}: {collective}: {ranks}"
            if type(ranks) is not int or ranks < 2:
                raise TSPError(f"{at}: expected a number of ranks, from 2")
            if not isinstance(pair, dict) or pair.keys() != {"latency", "bandwidth"}:
                raise TSPError(f"{at}: expected latency and bandwidth")
            latency, bandwidth = pair["latency"], pair["bandwidth"]
            if not _is_number(latency) or not _is_number(bandwidth) or not bandwidth:
                raise TSPError(
                    f"{at}: latency {latency!r}, bandwidth {bandwidth!r}: expected numbers, the "
                    "second above 0"
                )
            result.setdefault(collective, {})[ranks] = latency * 1e-6, bandwidth * 1e9
    return result
