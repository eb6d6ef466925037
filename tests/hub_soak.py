"""A hub that fails all the time: `python tests/hub_soak.py --seed S --faults N`.

Builds a data line of hub sources undisturbed, then again and again while faults of every kind hit its requests and its
preparer is killed at random instants, and rebuilds a cycle from its manifest, until N faults have been made; each time
the bytes must be the same. Prints one JSON object; exit 1 if they are not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / name) for name in ("hub", "data")]

import minicpm_hub  # noqa: E402
from data_helpers import train_tokenizer  # noqa: E402
from fake_hub import FakeHub, SeededFaults  # noqa: E402


def soak(root: Path, hub: FakeHub, seed: int, faults: int, kills: int, everything: bool) -> dict[str, object]:
    """Build lines until the faults are used up; what was done to them, and whether all came out the same."""
    import hub_lines

    from nstrain.data.rebuild import rebuild_cycle
    from nstrain.data.val import collect_held_out

    tokenizer = root / "tokenizer.json"
    tokenizer.write_text(train_tokenizer())
    recipe = hub_lines.find_recipe("minicpm") if everything else None
    minicpm_hub.fill(hub, seed)
    hub.fault = lambda request: None
    calm = hub_lines.build(root / "calm", tokenizer, recipe)
    expected = hub_lines.result(calm.work)
    began, draw = time.monotonic(), random.Random(seed)
    made = hub.fault = SeededFaults(seed, faults)
    deaths = lines = 0
    while made.left > 0:
        lines += 1
        line = hub_lines.make_line(root / f"line{lines}", tokenizer, recipe)
        collect_held_out(line, 3 * hub_lines.UNIT)
        shutil.rmtree(line.work / "downloads")
        for attempt in range(100):
            kill = {"NSTRAIN_KILL_POINT": f"{draw.choice(['hub', 'open', 'cycle'])}:{draw.randrange(1, 30)}"}
            workers = draw.choice((0, 2))
            if attempt < kills:
                child = hub_lines.preparer_child(hub, line.work, **kill)
            else:
                child = hub_lines.preparer_child(hub, line.work, workers=workers)
            made.renew()
            _, said = child.communicate(timeout=600)
            if child.returncode == 0:
                break
            if child.returncode != -signal.SIGKILL:
                return {"same": False, "seed": seed, "failed": said[-2000:]}
            deaths += 1
        if hub_lines.result(line.work) != expected:
            return {"same": False, "seed": seed, "failed": f"{line.work} differs"}
        cycle, again = draw.choice((1, 2)), root / "again"
        made.renew()
        rebuild_cycle(line.manifest_path(cycle), tokenizer, {}, again, workers=draw.choice((0, 2)))
        if any(p.read_bytes() != (again / p.name).read_bytes() for p in line.cycle_directory(cycle).iterdir()):
            return {"same": False, "seed": seed, "failed": f"cycle {cycle} of {line.work} is rebuilt otherwise"}
        for directory in (line.work, again):
            shutil.rmtree(directory)
        made.renew()
    seconds = round(time.monotonic() - began, 1)
    return {"same": True, "seed": seed, "lines": lines, "faults": made.made, "kills": deaths, "s": seconds}


def main() -> int:
    """Run a soak from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--kills", type=int, default=4, help="kills of a line's preparer, at most")
    parser.add_argument("--all", action="store_true", help="all 15 sources instead of four")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root, FakeHub(page_entries=100, stall_s=3.0) as hub:
        os.environ.update(HF_ENDPOINT=hub.endpoint, HF_HOME=f"{root}/hf", NO_PROXY="*")
        from nstrain.data.hub import patience

        patience.PATIENCE = dataclasses.replace(
            patience.Patience(), connect_s=1.0, read_s=0.5, stall_s=1.0, stall_bytes=1000, page_s=2.0,
            first_wait_s=0.02, longest_wait_s=0.1, reserve_bytes=0, wrong_fetches=8,
        )  # fmt: skip
        found = soak(Path(root), hub, arguments.seed, arguments.faults, arguments.kills, arguments.all)
    print(json.dumps(found))
    return 0 if found["same"] else 1


if __name__ == "__main__":
    sys.exit(main())
