"""The one place that names the version: the build, `twinflow.__version__` and `twinflow --version` read it."""

__version__ = "0.1.0"
