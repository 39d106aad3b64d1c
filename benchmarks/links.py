"""TSP against TP+SP where links bind: ``python -m benchmarks.links --rate 500mbit`` (as root).

Each rank runs in a network namespace of its own behind a link shaped to `--rate` each way (see
network.py), and reaches the others through it alone. First a gloo transfer shows that the shaping
binds. Reported beside the bytes that the ranks count are those that their interfaces sent.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import sidebyside
from benchmarks.network import Network
from megatron_tsp.errors import TSPError

#: Payload to shaped rate: headers take 4 to 5 %, ramping up a little; above 1 nothing is shaped.
LOWEST, HIGHEST = 0.75, 1.02
PROBE_S = 2  # of transfer at the shaped rate
PROBE_LIMIT_S = 300


@dataclass
class LinkedArm(sidebyside.BenchmarkArm):
    """An arm whose ranks are started one in each host of `network`."""

    network: Network = field(kw_only=True)

    def command(self, record: Path, logs: Path) -> list[str]:
        """The command that starts all ranks, each in its namespace."""
        train = [sys.executable, "-m", self.entry, *self.words()]
        return launcher(self.network, logs, [*train, "--tsp-record", str(record)])


def launcher(network: Network, logs: Path, command: list[str]) -> list[str]:
    """The command line that runs `command` on every host of `network`."""
    launch = [sys.executable, "-m", "benchmarks.launch", "--logs", str(logs)]
    launch += ["--master", network.addresses[0], "--namespaces", *network.names]
    return [*launch, "--", *command]


def check_shaping(network: Network, folder: Path) -> dict[str, float]:
    """Measure the links; returns {kind: bits per second}.

    Raises:
        TSPError: the links are faster than their rate, or much slower.
    """
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / "rates.json"
    out.unlink(missing_ok=True)
    mebibytes = max(1, round(network.bits_per_s / 8 * PROBE_S / sidebyside.MIB))
    probe = [sys.executable, "-m", "benchmarks.probe", str(out.resolve()), str(mebibytes)]
    command = launcher(network, folder, probe)
    with subprocess.Popen(command, start_new_session=True) as job:
        try:
            code = job.wait(PROBE_LIMIT_S)
        except BaseException:
            job.terminate()  # not kill: it has ranks to end
            raise
    if code or not out.exists():
        raise TSPError(f"the probe of the links failed; its logs are in {folder}")
    rates = json.loads(out.read_text())
    for kind, rate in rates.items():
        share = rate / network.bits_per_s
        print(f"link check, {kind}: {rate / 1e6:.1f} Mbit/s of payload, {share:.3f} of the rate")
        if not LOWEST <= share <= HIGHEST:
            raise TSPError(
                f"a link of {network.rate} carried {rate / 1e6:.1f} Mbit/s ({kind}): the shaping "
                "does not bind, or the processor cannot keep up with it"
            )
    return rates


def run(args: argparse.Namespace) -> None:
    """Check the links, run all shapes; write report.json and print the table."""
    folder = Path(args.out or f"ab-out/benchmark-links-{args.rate}")
    prepared = {shape: sidebyside.prepare(args, shape) for shape in args.shape}
    hosts = max(arm.ranks for arms in prepared.values() for arm in arms)
    results = {}
    with Network(hosts, args.rate) as network:
        rates = check_shaping(network, folder / "probe")
        for shape, plain in prepared.items():
            arms = [LinkedArm(**vars(arm), network=network) for arm in plain]
            results[shape] = sidebyside.measure(
                arms, args.rounds, args.iterations, folder / shape, network.sent
            )
        dropped = network.dropped()
    about = {"measured_bits_per_s": rates, "packets_dropped": dropped}
    sidebyside.write(folder, args, about, results)
    print(f"links: {args.rate} each way; packets dropped at them: {dropped}")


def main() -> int:
    """The command; returns its exit code."""
    parser = sidebyside.parser(__doc__, rounds=1)
    parser.add_argument("--rate", default="500mbit", help="of a link, each way (%(default)s)")
    return sidebyside.main(run, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
