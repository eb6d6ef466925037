"""For all tests: threads that wait sleep.

Test processes share few cores, and a thread that spins takes them from the one it waits for: with two trainers of two
threads on two cores an update of tiny-32k took 3.6 s, and 0.54 s so (alone on them 0.26 s, and 0.32 s so). The trainers
that tests start inherit it. It must come before torch is imported.

It stands here and not in tests/: pytest puts a conftest's directory on the import path, where tests/neuronspark would
be found as `neuronspark`.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
