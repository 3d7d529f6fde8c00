# SPDX-License-Identifier: Apache-2.0
"""Models that twinflow trains out of the box."""
