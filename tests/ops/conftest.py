"""A new line, one that was trained to its end and comes back as it was after each test, and processes to point at."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_lines import make_small_line

from nstrain.base.process import ProcessId, identify
from nstrain.line.paths import LinePaths
from nstrain.supervise.supervisor import Supervisor


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A second thread started here would keep this process from being set up the way the trainer's tests need it."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def paths(tmp_path: Path) -> LinePaths:
    """A new line, on a data line of which nothing is prepared."""
    return make_small_line(tmp_path)


@pytest.fixture(scope="session")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a line that was trained to its end, by the real trainer, with its data line beside it."""
    directory = tmp_path_factory.mktemp("trained") / "line"
    directory.mkdir()
    paths = make_small_line(directory, cycles=1)
    events: list[str] = []
    assert Supervisor(paths.root, events.append).run().outcome == "done", events
    shutil.copytree(directory, directory.with_name("as it was"))
    return directory


@pytest.fixture
def trained(trained_once: Path) -> Iterator[LinePaths]:
    """That line; the test may damage it."""
    yield LinePaths(trained_once / "run")
    shutil.rmtree(trained_once)
    shutil.copytree(trained_once.with_name("as it was"), trained_once)


@pytest.fixture
def dead_process() -> ProcessId:
    """A process that has ended."""
    process = subprocess.Popen(["sleep", "60"])
    identity = identify(process.pid)
    process.kill()
    process.wait()
    assert identity is not None
    return identity


@pytest.fixture
def other_process() -> Iterator[int]:
    """A process that runs."""
    process = subprocess.Popen(["sleep", "60"])
    yield process.pid
    process.kill()
    process.wait()
