"""`python -m meshplan` is the command line."""

import sys

from meshplan.cli.app import main

sys.exit(main())
