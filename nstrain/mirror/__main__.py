"""`python -m nstrain.mirror`: see process.py."""

from __future__ import annotations

import sys

from nstrain.mirror.process import main

if __name__ == "__main__":
    sys.exit(main())
