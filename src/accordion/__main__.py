"""Entry point of `python -m accordion`, which also `torchrun -m accordion` starts."""

import sys

from accordion.cli import main

if __name__ == "__main__":  # ranks that `accordion train` starts import this module under another name
    sys.exit(main())
