"""``python -m kvdrift.cli``."""

import sys

from kvdrift.cli.app import main

sys.exit(main())
