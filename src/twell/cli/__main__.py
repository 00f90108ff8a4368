"""`python -m twell.cli`, for machines where the console script is not installed."""

from . import main

main()
