"""`python -m twell`, for machines where the console script is not installed."""

from .cli import main

main()
