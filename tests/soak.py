"""A soak: a tiny real line under seeded random faults must end as the undisturbed one, to the bit.

    python tests/soak.py --seed 7 --faults 200

Every launch of the trainer has a fault at a random update: it crashes, is killed - anywhere, or in the middle of a
checkpoint's, a row's or an update's writes -, hangs in one of three ways, is signalled, loses its supervisor or its
preparer, finds a full disk, another process on its (made-up) card or a request to stop. What ends the line is answered
as an operator would: the same command again. At the end the journal holds every update once, no replayed update
differed, and journal and tensors are those of a line that nothing happened to. One seed, one row of faults.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent / name) for name in ("supervise", "helpers")]

from fault_lines import (  # noqa: E402
    Outcome,
    last_update,
    make_faulty_line,
    make_long_data_line,
    outcome,
    supervisor,
    use_standin,
)

from nstrain.base.errors import ExitCode  # noqa: E402
from nstrain.line.paths import LinePaths  # noqa: E402
from nstrain.record.journal import Journal  # noqa: E402

KINDS = (
    "crash", "kill", "segfault", "sigterm", "sigstop", "hang", "hang deaf", "kill supervisor", "kill both",
    "full disk", "others", "others and crash", "stop",
)  # fmt: skip
AREAS = {"checkpoint": 20, "journal": 6, "train": 4}
"""Kill points that are tried in an area."""

ANSWERED = (ExitCode.FAILED, ExitCode.STOPPED, ExitCode.NEEDS_OPERATOR, -signal.SIGKILL)
"""Ends of a supervisor after which the same command goes on."""

RUN_LIMIT_S = 600


def draw_fault(draw: random.Random) -> dict[str, Any]:
    """A fault, and after how many updates of its launch; -1: before the trainer has begun."""
    do = draw.choice(KINDS)
    if draw.random() < 0.3:
        area = draw.choice(sorted(AREAS))
        do = f"kill in {area} {draw.randint(1, AREAS[area])}"
    before = do in ("crash", "kill", "sigterm") and draw.random() < 0.1
    return {"do": do, "after": -1 if before else draw.randint(0, 3)}


def soak(seed: int, count: int, root: Path, say: Any = print) -> None:
    """Run a line through its faults and compare it; raises `AssertionError` for what differs."""
    draw = random.Random(seed)
    faults = [draw_fault(draw) for _ in range(count)]
    cycles = 2 + count // 10
    expected = undisturbed(root / "undisturbed", cycles)
    say(f"seed {seed}: {count} faults on a line of {cycles} cycles")

    directory = root / "disturbed"
    directory.mkdir()
    data = make_long_data_line(directory, cycles)
    paths = make_faulty_line(directory, data, *faults)
    directory.joinpath("run.card").mkdir()
    use_standin(directory / "host.json")
    ends: collections.Counter[int] = collections.Counter()
    while True:
        code, output = run(paths, directory / "host.json")
        ends[code] += 1
        if code == ExitCode.DONE:
            break
        assert code in ANSWERED, f"seed {seed}: a supervisor ended with {code}\n{output}"
        had = int((directory / "run.launches").read_text())
        say(f"  {had} launches; a supervisor ended with {code}")
    had = int((directory / "run.launches").read_text())
    assert had > count, f"seed {seed}: the line was done after {had} launches, before all {count} faults"
    found = outcome(paths)
    with Journal.open_for_reading(paths.journal) as journal:
        assert [row["update"] for row in journal.rows()] == list(range(last_update(data) + 1)), f"seed {seed}"
    assert found == expected, f"seed {seed}: journal or tensors differ from those of the undisturbed line"
    kinds = collections.Counter(fault["do"].rstrip("0123456789 ") for fault in faults)
    say(f"equal after {had} launches; faults: " + ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())))
    say("ends: " + ", ".join(f"{n} with {code}" for code, n in sorted(ends.items())))


def undisturbed(directory: Path, cycles: int) -> Outcome:
    """What a line of so many cycles comes to if nothing happens."""
    directory.mkdir()
    paths = make_faulty_line(directory, make_long_data_line(directory, cycles))
    use_standin(directory / "host.json")
    code, output = run(paths, directory / "host.json")
    assert code == ExitCode.DONE, output
    return outcome(paths)


def run(paths: LinePaths, host: Path) -> tuple[int, str]:
    """Supervise the line to an end."""
    os.environ["NSTRAIN_HOST"] = str(host)
    process = supervisor(paths, "real")
    output, _ = process.communicate(timeout=RUN_LIMIT_S)
    return process.returncode, output


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--directory", type=Path, default=None, help="an empty one, kept (default: a temporary one)")
    asked = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10**6) if asked.seed is None else asked.seed
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        root = asked.directory or Path(temporary)
        root.mkdir(parents=True, exist_ok=True)
        try:
            soak(seed, asked.faults, root, lambda text: print(text, flush=True))
        except AssertionError as error:
            print(f"FAILED: {error}", file=sys.stderr)
            log = root / "disturbed" / "run.log"
            if log.exists():
                print("\n".join(log.read_text().splitlines()[-40:]), file=sys.stderr)
            return 1
    print(json.dumps({"seed": seed, "faults": asked.faults, "seconds": round(time.monotonic() - began)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
