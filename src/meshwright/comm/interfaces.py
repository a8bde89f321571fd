"""The machine that a rank is on, and its network interface. No torch here."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import socket
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from meshwright.errors import ConfigError, refusal

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_SIOCGIFADDR: Final = 0x8915  # of Linux's netdevice(7)
# What gloo and NCCL read; where one is set, it is the user's choice, of the other too.
VARIABLES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def boot_id() -> str:
    """Return the random id of this machine's boot under Linux; empty on other systems."""
    return _BOOT.read_text().strip() if _BOOT.is_file() else ""


def machine_id() -> int:
    """Return a 32-bit number that identifies the machine, 0 if unknown."""
    boot = boot_id()
    return zlib.crc32(boot.encode()) if boot else 0


def address_towards(host: str, port: int) -> str:
    """Return this machine's address on the route to a host; sends nothing.

    Empty if there is no route.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((host, port))
            return str(way.getsockname()[0])
    except OSError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether a name or an address is this machine's loopback, without asking a server."""
    if host.startswith(("localhost", "ip6-localhost")):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen_at(host: str, port: int, *, is_alone: bool) -> tuple[socket.socket, str]:
    """Return a socket that listens at a host that is this machine, and its address.

    It listens only on the interface that has the host's address. If the name resolves to loopback,
    as Debian's hosts file does with a machine's own name, loopback is enough only if all ranks are
    on this machine (`is_alone`); otherwise, it listens on all interfaces. It also does if this
    machine doesn't have the address, as behind NAT. Raises `OSError` if the port is taken.
    """
    addresses = _addresses(host, port)
    if is_alone or not any(is_loopback(address) for _, address in addresses):
        for family, address in addresses:
            try:
                return socket.create_server((address, port), family=family, backlog=1024), address
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    server = socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=dual)
    return server, host


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [(family, str(address[0])) for family, _, _, _, address in infos]


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each interface that has one; empty if not Linux."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it is down, or has none
                continue
            addresses[name] = socket.inet_ntoa(reply[20:24])
    return addresses


def asked_for(environ: Mapping[str, str]) -> str | None:
    """Return the network interface that the environment selects; `ConfigError` if this machine
    lacks it.

    NCCL accepts `=eth0` for exactly that name, `eth` as a prefix and `^eth` to exclude, gloo one or
    several names: only a plain name is compared with the interfaces here.
    """
    known = [name for _, name in socket.if_nameindex()]
    for variable in VARIABLES:
        value = environ.get(variable, "")
        for name in (part.removeprefix("=") for part in value.split(",") if part):
            is_one = name in known or any(interface.startswith(name) for interface in known)
            if not name.startswith("^") and not is_one:
                rule = f"{variable} = {value}, but this machine has no such interface"
                raise ConfigError(refusal(rule, legal=known))
    first = environ.get(VARIABLES[0], "").split(",")[0]
    return first or None


def own_address(towards: str, addresses: Sequence[str], port: int) -> str:
    """Return the address at which others reach this machine.

    `towards` is its address on the route to the rendezvous. The machine at the rendezvous may find
    itself on loopback, because its hosts file has its own name there; then the route to the first
    of the `addresses` that is not on loopback counts.
    """
    if towards and not is_loopback(towards):
        return towards
    away = [address for address in addresses if address and not is_loopback(address)]
    return address_towards(away[0], port) if away else towards


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an address; 127.0.0.0/8 belongs to loopback."""
    by_address = {has: name for name, has in interfaces().items()}
    return by_address.get("127.0.0.1" if is_loopback(address) else address)
