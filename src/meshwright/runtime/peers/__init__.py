"""Adapters of other training frameworks ("peers"), for `meshwright bench peers`.

Each adapter trains the same Llama with one of them.

    python -m meshwright.runtime.peers.native --mode ddp --steps 4 --microbatch 2

starts two ranks with one thread each and prints one JSON line. Adapters import nothing of
meshwright outside this package, so that a peer's own interpreter can run them.
"""
