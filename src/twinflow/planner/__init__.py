# SPDX-License-Identifier: Apache-2.0
"""Predicts memory and time of a run from the rates of a machine, and chooses the placement of the optimizer state."""
