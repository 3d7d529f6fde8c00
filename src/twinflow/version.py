# SPDX-License-Identifier: Apache-2.0
"""The version. The build, `twinflow.__version__` and `twinflow --version` read it from here."""

__version__ = "0.2.0"
