# SPDX-License-Identifier: Apache-2.0
"""`python -m twinflow` runs the command `twinflow`."""

from twinflow.cli.main import main

main()
