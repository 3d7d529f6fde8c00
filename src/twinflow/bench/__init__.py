"""Measuring: what this machine is and how fast the kernels run on it. Printing is the command line's."""
