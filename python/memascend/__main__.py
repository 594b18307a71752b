"""`python -m memascend` is `memascend`."""

import sys

from memascend.cli import main

sys.exit(main())
