import sys

from hasten.cli import main

sys.exit(main())
