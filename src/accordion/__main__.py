"""`python -m accordion`, and what `torchrun -m accordion` starts."""

import sys

from accordion.cli import main

if __name__ == "__main__":  # the ranks that train starts import this module again under another name
    sys.exit(main())
