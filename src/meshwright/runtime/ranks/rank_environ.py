"""The environment that ranks are started with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# glibc gives blocks from 128 KiB (later more, at most 32 MiB) back to the system as they are freed,
# and gets new ones in pieces of 4 KiB, each of them zeroed as it is touched for the first time: a
# step allocates gigabytes of activations so. Here it keeps them, and asks for pieces of 2 MiB.
# The GNU C Library, section 39.2, Memory Allocation Tunables; other libraries ignore it.
ALLOCATOR: Final = ":".join(
    (
        "glibc.malloc.hugetlb=1",
        f"glibc.malloc.mmap_threshold={1 << 30}",
        f"glibc.malloc.trim_threshold={1 << 30}",
    )
)


# Of a rank with a GPU, each unless the user has set it or another word for it. Memory that grows in
# place leaves no gaps between blocks of other sizes; NCCL's last collectives say what hangs.
_ON_GPUS: Final = (
    (("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), "expandable_segments:True"),
    (("TORCH_FR_BUFFER_SIZE",), "2000"),
)
_COMPILERS: Final = "TORCHINDUCTOR_COMPILE_THREADS"


def rank_environ(
    environ: Mapping[str, str],
    threads: int = 1,
    *,
    keeps_memory: bool = True,
    on_gpus: bool = False,
) -> dict[str, str]:
    """Return the environment of ranks with so many threads each.

    `keeps_memory` False leaves the allocator alone, for ranks with a memory limit. Variables that
    are already set stay.
    """
    variables = {**environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    tunables = environ.get("GLIBC_TUNABLES", "")
    if keeps_memory and sets_allocator(environ):
        variables["GLIBC_TUNABLES"] = f"{tunables}:{ALLOCATOR}" if tunables else ALLOCATOR
    return {**variables, **gpu_environ(environ, threads)} if on_gpus else variables


def gpu_environ(environ: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return additional environment variables for a rank with a GPU."""
    variables: dict[str, str] = {}
    for names, value in _ON_GPUS:
        if not any(name in environ for name in names):
            variables.update(dict.fromkeys(names, value))
    if _COMPILERS not in environ:  # torch's compiler would take all cores on each rank
        variables[_COMPILERS] = str(threads)
    return variables


def sets_allocator(environ: Mapping[str, str]) -> bool:
    """Return whether ranks get our settings of glibc's allocator: if none are set."""
    return "glibc.malloc" not in environ.get("GLIBC_TUNABLES", "") and "LD_PRELOAD" not in environ
