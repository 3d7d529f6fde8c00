"""Predicts memory and time of a run: rates of the machine, time of a step, and placement of the optimizer state."""
