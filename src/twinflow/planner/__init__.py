"""Bytes and seconds before a run: what a machine does in a second, what a step will take, which state lives where."""
