"""`python -m meshwright`, as torchrun starts it."""

import sys

from meshwright.cli import main

sys.exit(main())
