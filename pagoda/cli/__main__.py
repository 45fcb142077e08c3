"""`python -m pagoda.cli`."""

from pagoda.cli import main

main()
