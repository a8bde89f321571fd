"""The version of the package, in one place for metadata and runs."""

__version__ = "0.2.0.dev0"
