"""The version, read by the build and by ``RunStarted``."""

__version__ = "0.1.0"
