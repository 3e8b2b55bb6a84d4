"""Names, ports and interfaces: whether ranks can find each other. Nothing listens here: a port is bound and let go."""

from __future__ import annotations

import errno
import ipaddress
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from accordion.doctor.findings import Finding
from accordion.doctor.options import host_and_port
from accordion.errors import UsageError

TORCHRUN = ("127.0.0.1", 29500)  # where torchrun's ranks meet unless it is told otherwise
PATIENCE_S = 3.0  # for the first answer of another machine
SLOW_S = 1.0  # for looking a name up
INTERFACES = {"GLOO_SOCKET_IFNAME": "gloo", "NCCL_SOCKET_IFNAME": "NCCL"}


def network(master: str | None, environ: Mapping[str, str], *, started: bool) -> list[Finding]:
    """Everything before ranks meet. `master`: HOST:PORT that somebody named. `started`: a launcher has begun the job, which
    holds its port by now.
    """
    return [own_name(), *meeting(master, environ, started=started), *interfaces(environ)]


def addresses_of(host: str) -> tuple[list[str], float]:
    """Addresses of a name, and the seconds that it took. Raises `OSError` where it has none."""
    began = time.perf_counter()
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found)), time.perf_counter() - began


def own_name() -> Finding:
    """gloo looks this machine's own name up to choose the interface on which it listens."""
    name, check = socket.gethostname(), "network.own-name"
    try:
        addresses, _ = addresses_of(name)
    except OSError as error:
        return Finding(
            check=check,
            severity="warning",
            found=f"this machine's own name, {name!r}, has no address: {error.strerror}",
            means="gloo falls back to the loopback interface: ranks of several machines do not reach each other",
            do=f"put a line for {name} with this machine's address in /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface.",
        )
    if all(ipaddress.ip_address(a.partition("%")[0]).is_loopback for a in addresses):
        return Finding(
            check=check,
            severity="note",
            found=f"this machine's own name, {name!r}, is {', '.join(addresses)}: the loopback interface",
            means="ranks on one machine meet; of several machines those of gloo wait for each other until the time-out",
            do=f"for several machines give {name} its network address in /etc/hosts, or set GLOO_SOCKET_IFNAME to an interface.",
            data={"addresses": addresses},
        )
    return Finding(
        check=check,
        severity="ok",
        found=f"this machine's own name, {name!r}, is {', '.join(addresses)}",
        means="gloo listens on that address",
        data={"addresses": addresses},
    )


def meeting(master: str | None, environ: Mapping[str, str], *, started: bool = False) -> list[Finding]:
    """The address where ranks meet: its name, and its port."""
    whose = "--master"
    named = master
    if named is None and environ.get("MASTER_ADDR"):
        whose = "MASTER_ADDR and MASTER_PORT"
        named = f"{environ['MASTER_ADDR']}:{environ.get('MASTER_PORT') or TORCHRUN[1]}"
    try:
        host, port = TORCHRUN if named is None else host_and_port(whose, named)
    except UsageError as error:
        return [
            Finding(
                check="network.master",
                severity="problem",
                found=str(error).rstrip("."),
                means="ranks do not know where to meet, and none starts",
                do="set MASTER_ADDR to the first machine and MASTER_PORT to a free port, for all ranks alike; torchrun does.",
            )
        ]
    try:
        addresses, seconds = addresses_of(host)
    except OSError as error:
        return [
            Finding(
                check="network.master",
                severity="problem",
                found=f"{host!r} ({whose}) has no address here: {error.strerror}",
                means="this machine's ranks never meet the others: each waits until the time-out",
                do=f"see that the name is right and that DNS or /etc/hosts of this machine knows it (getent hosts {host}), or "
                "give its address.",
            )
        ]
    slow = seconds > SLOW_S
    found = [
        Finding(
            check="network.master",
            severity="warning" if slow else "ok",
            found=f"{host} is {', '.join(addresses)}, looked up in {seconds:.2f} s",
            means="each new connection may wait so long; many ranks at once overload the name server"
            if slow
            else "ranks can find it",
            do="put it into /etc/hosts, or give its address." if slow else "",
            data={"addresses": addresses, "seconds": seconds},
        )
    ]
    return found if started else [*found, _port(host, addresses[0], port, asked=named is not None)]


def _port(host: str, address: str, port: int, *, asked: bool) -> Finding:
    """Of this machine: whether it is free; of another one: whether that answers. `asked`: somebody named it."""
    check, at = "network.port", f"{host}:{port}"
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as own:
        own.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as torch's store does: a port of a job just ended is free
        try:
            own.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return _other_machine(at, family, address, port)
            taken = error.errno == errno.EADDRINUSE
            return Finding(
                check=check,
                severity="problem" if asked else "warning",
                found=f"port {at} is in use" if taken else f"port {at} cannot be taken: {error.strerror}",
                means="the first rank cannot keep the job's store there, and the job ends at its start"
                if asked
                else "torchrun of several machines meets there unless told otherwise, and would fail",
                do=f"ss -ltnp 'sport = :{port}' shows who has it; give torchrun another --master-port, or --standalone.",
                data={"errno": error.errno},
            )
    return Finding(
        check=check, severity="ok", found=f"port {at} is free", means="the first rank can keep the job's store there"
    )


def _other_machine(at: str, family: int, address: str, port: int) -> Finding:
    check = "network.port"
    with socket.socket(family, socket.SOCK_STREAM) as own:
        own.settimeout(PATIENCE_S)
        try:
            own.connect((address, port))
        except ConnectionRefusedError:
            return Finding(
                check=check,
                severity="ok",
                found=f"{at} is another machine, which answers; nothing listens there yet",
                means="ranks here will reach the first one, once it has started",
            )
        except OSError as error:
            return Finding(
                check=check,
                severity="problem",
                found=f"{at} is another machine, which cannot be reached: {error.strerror or error}",
                means="ranks here never meet the first one: they wait until the time-out",
                do="see that the machine is up and on this network, and that no firewall drops connections to that port.",
            )
    return Finding(
        check=check,
        severity="note",
        found=f"{at} is another machine, where something listens already",
        means="a job that has begun, or another program: then the first rank cannot keep the store there",
        do=f"if no job of yours runs, see there who it is: ss -ltnp 'sport = :{port}'.",
    )


def interfaces(environ: Mapping[str, str], states: Path = Path("/sys/class/net")) -> list[Finding]:
    """Those of this machine, and those that variables ask for."""
    here = [name for _, name in socket.if_nameindex()]
    others = [name for name in here if name != "lo" and _is_up(states / name)]
    found = [
        Finding(
            check="network.interfaces",
            severity="ok" if others else "note",
            found=f"interfaces that are up: {', '.join(others) or 'the loopback alone'}",
            means="ranks can talk over them" if others else "ranks of this machine can talk, and no others",
            do="" if others else "connect the machine, if several are to train together.",
            data={"interfaces": here},
        )
    ]
    for key, library in INTERFACES.items():
        if not environ.get(key):
            continue
        chosen = _chosen(environ[key], here, prefixes=library == "NCCL")
        down = [name for name in chosen if name != "lo" and not _is_up(states / name)]
        good = bool(chosen) and not down
        found.append(
            Finding(
                check=f"network.{library.lower()}-interface",
                severity="ok" if good else "problem",
                found=f"{key} is {environ[key]!r}: "
                + (
                    f"{', '.join(down)} is down"
                    if down
                    else ", ".join(chosen) or f"there is no such interface, but {', '.join(here)}"
                ),
                means=f"{library} talks over it"
                if good
                else f"{library} finds no address and ranks fail as they form their group",
                do="" if good else f"set {key} to one of {', '.join(others) or 'lo'}, or unset it.",
            )
        )
    return found


def _is_up(interface: Path) -> bool:
    """Its state; an interface of which the system says nothing (loopback, tunnels) counts as up."""
    try:
        return (interface / "operstate").read_text().strip() not in ("down", "lowerlayerdown", "notpresent")
    except OSError:
        return True


def _chosen(value: str, here: Sequence[str], *, prefixes: bool) -> list[str]:
    """Which interfaces a variable means. NCCL takes beginnings of names, `=` before whole names and `^` before unwanted ones."""
    if not prefixes:
        return [name for name in value.split(",") if name in here]
    sign = value[0] if value[0] in "^=" else ""
    names = value.lstrip("^=").split(",")
    exact = value.startswith(("=", "^="))

    def is_meant(name: str) -> bool:
        return name in names if exact else name.startswith(tuple(names))

    return [name for name in here if is_meant(name) != (sign == "^")]
