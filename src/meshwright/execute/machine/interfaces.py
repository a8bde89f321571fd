"""The machine that a rank is on, and the interface that it talks through. No torch here."""

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
    """Return the number that Linux drew when this machine booted; empty on other systems."""
    return _BOOT.read_text().strip() if _BOOT.is_file() else ""


def machine_id() -> int:
    """Return a number of 32 bits that tells machines apart, 0 where it is not known."""
    boot = boot_id()
    return zlib.crc32(boot.encode()) if boot else 0


def address_towards(host: str, port: int) -> str:
    """Return this machine's address on the way to another; nothing is sent.

    Where there is no way, it is empty.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((host, port))
            return str(way.getsockname()[0])
    except OSError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether a name or an address leads a machine to itself, without asking anyone."""
    if host.startswith(("localhost", "ip6-localhost")):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen_at(host: str, port: int, *, is_alone: bool) -> tuple[socket.socket, str]:
    """Return a socket that listens at a host that is this machine, and the address to reach it.

    It listens on the one interface that the host's address belongs to. Where the name leads to
    loopback here, as Debian's hosts file has a machine's own name, loopback does only for ranks
    that are all on this machine (`is_alone`); for others it listens on all interfaces, and so it
    does where the address is not one of this machine's, as behind a translation of addresses.
    Raises `OSError` where the port is taken.
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
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [(family, str(at[0])) for family, _, _, _, at in found]


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each interface that has one; nothing where it is not Linux."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode()[:15])
            try:
                told = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, asked)
            except OSError:  # it is down, or has none
                continue
            found[name] = socket.inet_ntoa(told[20:24])
    return found


def asked_for(environ: Mapping[str, str]) -> str | None:
    """Return the interface that the environment asks for; raises `ConfigError` for one not here.

    NCCL takes `=eth0` for exactly that name, `eth` for all that begin so and `^eth` for others,
    gloo one name or several: only a plain name is compared with what is here.
    """
    known = [name for _, name in socket.if_nameindex()]
    for variable in VARIABLES:
        value = environ.get(variable, "")
        for name in (part.removeprefix("=") for part in value.split(",") if part):
            is_one = name in known or any(one.startswith(name) for one in known)
            if not name.startswith("^") and not is_one:
                what = f"{variable} = {value}, but this machine has no such interface"
                raise ConfigError(refusal(what, legal=known))
    first = environ.get(VARIABLES[0], "").split(",")[0]
    return first or None


def own_address(towards: str, others: Sequence[str], port: int) -> str:
    """Return the address at which others reach this machine.

    `towards` is its address on the way to where ranks meet. The machine that is there finds itself
    on loopback where its hosts file has its own name there; then the way to the first of the
    `others` that is not on loopback counts.
    """
    if towards and not is_loopback(towards):
        return towards
    away = [address for address in others if address and not is_loopback(address)]
    return address_towards(away[0], port) if away else towards


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an address; all of 127.0.0.0/8 is loopback's."""
    found = {has: name for name, has in interfaces().items()}
    return found.get("127.0.0.1" if is_loopback(address) else address)
