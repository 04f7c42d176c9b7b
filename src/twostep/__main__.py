"""``python -m twostep``."""

import sys

from twostep.entrypoints.cli.main import main

sys.exit(main())
