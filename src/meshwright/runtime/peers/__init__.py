"""The peers' side of `meshwright bench peers`: each module trains the same Llama in one peer's way.

    python -m meshwright.runtime.peers.native --mode ddp --steps 4 --microbatch 2

starts two ranks with one thread each and prints one JSON line. Nothing here imports meshwright, so
that a peer's own interpreter can run it.
"""
