"""The version of the installed package; 0.0.0 in a source tree that was never installed."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("trace-lightning")
except PackageNotFoundError:
    __version__ = "0.0.0"
