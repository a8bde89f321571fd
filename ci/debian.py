"""`python3 -m ci.debian` installs what the tests need of the distribution, where it is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Final, NamedTuple


class Package(NamedTuple):
    """A package of Debian, and a command that is there once it is installed."""

    name: str
    command: str


# Namespaces for two hosts on one machine, and what torch's compiler calls; it brings cc, too.
BASE: Final = (
    Package("iproute2", "ip"),
    Package("g++", "g++"),
    # What reads the core dumps of ranks that crash.
    Package("gdb", "gdb"),
    # What emulates processors.
    Package("util-linux", "unshare"),
    Package("mount", "mount"),
)
SYSTEM_FOLDERS: Final = "/usr/local/sbin:/usr/sbin:/sbin"


def missing(packages: Sequence[Package]) -> list[str]:
    """Return the names of those whose command is not there."""
    path = f"{os.environ.get('PATH', os.defpath)}:{SYSTEM_FOLDERS}"
    return [one.name for one in packages if shutil.which(one.command, path=path) is None]


def install(packages: Sequence[Package]) -> None:
    """Install those that are missing. Raises `SystemExit` where this takes a person."""
    names = missing(packages)
    if not names:
        return
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise SystemExit(f"install {' '.join(names)} (names of Debian), or run this as root there")
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    words = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", *names]
    for command in (["apt-get", "update", "--quiet"], words):
        subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    install(BASE)
