"""The version of the package, in one place for metadata and runs."""

__version__ = "0.3.0.dev0"
