"""The `twinflow` command."""
