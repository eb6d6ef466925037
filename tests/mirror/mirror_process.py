"""The mirror's process with a service that lives in a directory: `mirror_process.py DIRECTORY RUN --parent-fd N`.

What the service has taken stands in a file a run, its config and then its rows, and is durable against kill -9.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fake_tracker import FakeClock, FakeRun, FakeService, FakeTracker

from nstrain.mirror.clock import MirrorPace
from nstrain.mirror.process import main

PACE = MirrorPace(poll_s=0.02, verify_s=0.1, settle_s=0.05, lag_s=2.0, away_s=0.05, ending_s=20.0)


class FileService(FakeService):
    """A service in a directory."""

    def __init__(self, directory: Path) -> None:
        super().__init__(FakeClock())
        self._directory = directory
        for path in sorted(directory.glob("*.jsonl")):
            *lines, torn = path.read_text().split("\n")
            if torn:  # what was cut by a kill was not taken
                path.write_text("".join(line + "\n" for line in lines))
            if lines:
                config, *rows = (json.loads(line) for line in lines)
                run = self.runs[path.stem] = FakeRun(config["nstrain"]["generation"], config)
                run.rows = {row["update"]: row for row in rows}
                self.check(len(run.rows) == len(rows), f"{path}: a row twice")
                run.top, run.shown_from = max(run.rows, default=-1), dict.fromkeys(run.rows, 0.0)

    def taken(self, run_id: str, what: dict[str, Any]) -> None:
        with (self._directory / f"{run_id}.jsonl").open("a") as file:
            file.write(json.dumps(what) + "\n")


if __name__ == "__main__":
    service = Path(sys.argv.pop(1))
    sys.exit(main(lambda _: FakeTracker(FileService(service)), PACE))
