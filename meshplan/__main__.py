"""`python -m meshplan` is the command line."""

import sys

from meshplan.cli import main

sys.exit(main())
