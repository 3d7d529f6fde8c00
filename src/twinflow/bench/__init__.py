# SPDX-License-Identifier: Apache-2.0
"""Measurements: a description of the machine and the speed of the kernels. The command line prints the results."""
