"""Runs the `memascend` command as `python -m memascend`."""

import sys

from memascend.cli import main

sys.exit(main())
