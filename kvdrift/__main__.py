"""``python -m kvdrift``."""

import sys

from kvdrift.cli import main

if __name__ == "__main__":
    sys.exit(main())
