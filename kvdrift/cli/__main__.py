"""``python -m kvdrift.cli``, the same as ``python -m kvdrift``."""

import sys

from kvdrift.cli import main

if __name__ == "__main__":
    sys.exit(main())
