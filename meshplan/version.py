"""The version, for the package, the JSON envelope and the lock file."""

__version__ = "0.1.0"
