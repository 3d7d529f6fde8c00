"""`python -m twinflow`: the same as the installed command."""

from twinflow.cli.main import main

main()
