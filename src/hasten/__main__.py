"""Run the command line with `python -m hasten`."""

import sys

from hasten.cli import main

sys.exit(main())
