# SPDX-License-Identifier: Apache-2.0
"""Runs of several processes: `twinflow launch` starts the ranks, and `init_distributed` joins their process group."""
