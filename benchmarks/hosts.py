"""Run a command on several hosts: network namespaces of this machine, joined by a network of a given rate. Needs root.

    sudo .venv/bin/python benchmarks/hosts.py --hosts 2 --rate 1gbit -- .venv/bin/python examples/torch_digits.py
    sudo .venv/bin/python benchmarks/hosts.py --hosts 4 --launcher horovodrun -- .venv/bin/python benchmarks/step_time.py
    sudo .venv/bin/python benchmarks/hosts.py --rate 20mbit --delay 80 --loss 1 -- .venv/bin/python benchmarks/network.py

Every host has one network card, `eth0`, an address and a host name of its own; it shares processors, files and memory with
the others. mpirun and horovodrun reach the hosts by an agent in place of ssh, and everything else is as between machines: the
workers see each other by TCP alone. Whatever was made is removed in the end; the machine's own network is not touched.

By default a bridge joins the hosts, without delay and loss. With `--delay` or `--loss`, `far.py` passes their frames on.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

NETWORK = "10.77.0."
"""Addresses of the hosts, which nothing outside of their namespaces can see."""
MOST_HOSTS = 64
PROGRAMS = ("ip", "tc", "unshare")

RINGS = {
    "coll_tuned_use_dynamic_rules": "1",
    "coll_tuned_allreduce_algorithm": "4",
    "coll_tuned_allgatherv_algorithm": "3",
}
"""Let Open MPI use rings. What it chooses itself for large messages is slower with more than two hosts."""

# Called as ssh is: options, also behind the host, and then the command in words. `ip netns exec` gives it mounts of its own.
AGENT = """#!/bin/sh
host=
while [ -z "$host" ] || [ "${{1#-}}" != "$1" ]; do
    case $1 in
        -x) shift ;;
        -*) shift 2 ;;
        *) host=$1; shift ;;
    esac
done
exec ip netns exec {prefix}-"$host" unshare --uts sh -c "mount --bind {names} /etc/hosts && hostname $host && $*"
"""


class Network(NamedTuple):
    """What joins the hosts."""

    rate: str
    """Of every network card, as tc writes it, such as 1gbit."""
    delay: float = 0.0
    """Milliseconds from one host to another; a round trip takes twice as long."""
    loss: float = 0.0
    """Percent of the frames that do not arrive."""

    @property
    def is_far(self) -> bool:
        return self.delay > 0.0 or self.loss > 0.0

    def __str__(self) -> str:
        return f"{self.rate}, {self.delay:g} ms, {self.loss:g} % loss" if self.is_far else self.rate


class Cluster(NamedTuple):
    """The hosts that are there."""

    hosts: tuple[str, ...]
    agent: Path
    """What launchers call instead of ssh; its name is ssh, since horovodrun cannot be told another one."""
    prefix: str
    """Begins the names of the namespaces."""

    def set_link(self, host: str, state: str) -> None:
        """Set a host's network card "up" or "down"."""
        _run("ip", "-n", f"{self.prefix}-{host}", "link", "set", "eth0", state)

    def processes(self, host: str) -> list[int]:
        """Return what runs on a host."""
        return _processes(f"{self.prefix}-{host}")

    def shape(self, host: str, rate: str) -> None:
        """Give a host's network card another rate for what it sends."""
        _shape(f"{self.prefix}-{host}", "eth0", rate)


def missing() -> str:
    """What keeps this machine from making hosts; empty if nothing does."""
    lacking = [program for program in PROGRAMS if shutil.which(program) is None]
    if lacking:
        return f"it needs {' and '.join(lacking)} (Debian and Ubuntu: apt-get install iproute2 util-linux)"
    name = f"hs{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"it must be run as root, on a machine that allows network namespaces ({tried.stderr.strip()})"
    _run("ip", "netns", "delete", name)
    return ""


@contextmanager
def cluster(hosts: int, network: Network) -> Iterator[Cluster]:
    """Make hosts that a network joins, and remove them in the end, also when this process is asked to end."""
    if network.delay < 0 or not 0 <= network.loss < 100:
        raise SystemExit(f"delay must be >= 0 and loss in [0, 100), got {network.delay} and {network.loss}")
    reason = missing()
    if reason:
        raise SystemExit(f"no hosts can be made here: {reason}")
    before = signal.signal(signal.SIGTERM, _interrupted)
    prefix = f"hs{os.getpid()}"
    names = tuple(f"host{number}" for number in range(hosts))
    switch = f"{prefix}-switch"
    with tempfile.TemporaryDirectory(prefix=f"{prefix}-") as folder:
        known = Path(folder, "hosts")
        lines = ["127.0.0.1 localhost", *(f"{NETWORK}{number + 1} {name}" for number, name in enumerate(names))]
        known.write_text("".join(f"{line}\n" for line in lines), encoding="ascii")
        agent = Path(folder, "ssh")
        agent.write_text(AGENT.format(prefix=prefix, names=known), encoding="ascii")
        agent.chmod(0o755)
        spaces = [f"{prefix}-{name}" for name in names]
        try:
            for space in (switch, *spaces):
                _run("ip", "netns", "add", space)
            (_join_far if network.is_far else _join)(switch, spaces, network)
            for number, space in enumerate(spaces):
                _run("ip", "-n", space, "address", "add", f"{NETWORK}{number + 1}/24", "dev", "eth0")
                for device in ("lo", "eth0"):
                    _run("ip", "-n", space, "link", "set", device, "up")
                _shape(space, "eth0", network.rate)
            yield Cluster(names, agent, prefix)
        finally:
            for space in (*spaces, switch):
                _remove(space)
            signal.signal(signal.SIGTERM, before)


def _join(switch: str, spaces: Sequence[str], network: Network) -> None:
    """Give each host a device `eth0` at a bridge, which is in a namespace of its own."""
    _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
    _run("ip", "-n", switch, "link", "set", "bridge", "up")
    for number, space in enumerate(spaces):
        port = f"port{number}"
        _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
        _shape(switch, port, network.rate)


def _join_far(switch: str, spaces: Sequence[str], network: Network) -> None:
    """Give each host a device `eth0` of `far.py`, which runs in the switch's namespace and ends with it."""
    numbers = (str(len(spaces)), str(network.delay / 1000), str(network.loss / 100))
    far = [sys.executable, str(Path(__file__).with_name("far.py")), *numbers]
    process = subprocess.Popen(["ip", "netns", "exec", switch, *far], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        raise SystemExit(f"{' '.join(far)} has ended")
    for number, space in enumerate(spaces):
        _run("ip", "-n", switch, "link", "set", f"host{number}", "name", "eth0", "netns", space)


def _shape(space: str, device: str, rate: str) -> None:
    shape = ["tbf", "rate", rate, "burst", "512kb", "latency", "100ms"]
    _run("tc", "-n", space, "qdisc", "replace", "dev", device, "root", *shape)


def _remove(space: str) -> None:
    """End what still runs in a namespace, and delete it with its links."""
    for process in _processes(space):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)


def _processes(space: str) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")


def run(where: Cluster, launcher: str, slots: int, command: Sequence[str], *, rings: bool = False) -> int:
    """Start `slots` workers on every host, and wait for them; the launcher's exit status."""
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PATH": os.pathsep.join([str(where.agent.parent), os.environ.get("PATH", os.defpath)]),
    }
    line = [str(where.agent), where.hosts[0], shlex.join(_launch(where, launcher, slots, command, rings))]
    with subprocess.Popen(line, env=environment) as process:
        try:
            return process.wait()
        except BaseException:
            # Asked to end, a launcher ends its workers first.
            process.terminate()
            raise


def _launch(where: Cluster, launcher: str, slots: int, command: Sequence[str], rings: bool) -> list[str]:
    workers = ["-np", str(len(where.hosts) * slots), "-H", ",".join(f"{host}:{slots}" for host in where.hosts)]
    if launcher == "horovodrun":
        beside = Path(sys.executable).with_name("horovodrun")
        program = str(beside) if beside.exists() else "horovodrun"
        # Its cache remembers hosts by their addresses, which are the same in every run.
        return [program, "--gloo", "--disable-cache", *workers, "--network-interfaces", "eth0", *command]
    settings = {
        "plm_rsh_agent": str(where.agent),
        "btl": "tcp,self",
        "btl_tcp_if_include": "eth0",
        "oob_tcp_if_include": "eth0",
        "mpi_yield_when_idle": "1",
    }
    chosen = [word for mca in (settings | (RINGS if rings else {})).items() for word in ("--mca", *mca)]
    return ["mpirun", "--allow-run-as-root", *workers, "--bind-to", "none", *chosen, *command]


def _interrupted(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def add_network(add: Callable[..., object]) -> None:
    """Add the options that say what joins the hosts."""
    add("--rate", default="1gbit", help="of every host's network card, both ways, as tc writes it")
    add("--delay", type=float, default=0.0, help="milliseconds from host to host, one way")
    add("--loss", type=float, default=0.0, help="percent of the frames that are lost")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--slots", type=int, default=1, help="workers on each host")
    add_network(parser.add_argument)
    parser.add_argument("--rings", action="store_true", help="mpirun: let Open MPI use rings for large messages")
    parser.add_argument("--launcher", choices=["mpirun", "horovodrun"], default="mpirun")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what every worker runs, behind --")
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("say what to run, behind --")
    if not 1 <= args.hosts <= MOST_HOSTS or args.slots < 1:
        parser.error(f"--hosts must be in [1, {MOST_HOSTS}] and --slots >= 1, got {args.hosts} and {args.slots}")
    network = Network(args.rate, args.delay, args.loss)
    with cluster(args.hosts, network) as where:
        print(
            f"{args.hosts} hosts (network namespaces of one machine, {os.cpu_count()} cores), {network} each, "
            f"{args.slots} workers per host, {args.launcher}",
            file=sys.stderr,
            flush=True,
        )
        return run(where, args.launcher, args.slots, command, rings=args.rings)


if __name__ == "__main__":
    raise SystemExit(main())
