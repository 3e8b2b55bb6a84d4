"""`python -m accordion.bench.gpu`: as `accordion bench gpu`, from a checkout with `PYTHONPATH=src` too."""

import sys

from accordion.bench.gpu.command import run
from accordion.errors import UsageError


def main() -> int:
    try:
        return run(sys.argv[1:])
    except UsageError as error:
        print(f"accordion: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":  # rank processes import this module again under another name
    sys.exit(main())
