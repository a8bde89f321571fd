"""Faults that tests of several files put into a rank."""


def without_sums(parallel, *endings):
    """Have a rank keep its part of the gradients whose names end so; without endings, of all."""
    parallel.sums = tuple(
        one._replace(names=names)
        for one in parallel.sums
        if (names := tuple(n for n in one.names if endings and not n.endswith(endings)))
    )
