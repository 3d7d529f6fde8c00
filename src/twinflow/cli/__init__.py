"""Command line interface: the `twinflow` command and its subcommands."""
