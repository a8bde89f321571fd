"""The version of the package, in the one place that both metadata and runs read."""

__version__ = "0.2.0.dev0"
