"""The four steps of TRACE and the command line."""

__version__ = "0.1.0"
