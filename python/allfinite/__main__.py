"""Entry of `python -m allfinite`."""

import sys

from allfinite.cli import main

sys.exit(main())
