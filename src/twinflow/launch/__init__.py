"""Many processes as one run: `twinflow launch` starts them, `init_distributed` lets each find its rank."""
