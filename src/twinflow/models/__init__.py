"""Models that twinflow trains out of the box."""
