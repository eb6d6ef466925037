"""Which runs each part of the study wants, in order: pure functions of the table, so that a part can go on at any time.

Rates are on a ladder. An arm's search begins with the rates in the middle, and goes on beside the best one until both
of its neighbours are known, or it is the ladder's end: with one valley in the loss that finds its lowest step.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.study.arms import BASELINES, DEFAULT, MECHANISMS, SHAPES, TOGETHER
from benchmarks.study.table import Table, best, mean_loss
from benchmarks.study.training import Job

RATES = (6e-4, 1.5e-3, 3e-3, 6e-3, 1.2e-2)
FIRST_RATES = (3e-3, 1.5e-3)
SEEDS = (0, 1, 2)
EVIDENT_RATE = 3e-3
"""What mechanisms are compared at before the default's best rate is known."""
REPEATED = ("no-spikes", "everywhere")
"""Mechanisms that get all seeds: what spikes cost, and whether a neuron before every projection costs anything."""
REPEATED_SHAPES = 4
"""So many shapes get all seeds, those that look best with one: of fifteen some look better than they are."""


def wanted(parts: Sequence[str], table: Table) -> list[Job]:
    """The jobs of some parts that are known to be wanted; those that depend on others' results come after these."""
    return list(dict.fromkeys(job for part in parts for job in PARTS[part](table)))


def best_rate(table: Table, arm: str, size: str = "50M") -> float:
    """An arm's best rate so far: by the mean over the seeds that have been run."""
    rows = best(table.of(arm=arm, size=size, recipe="one epoch"))
    return float(rows[0]["rate"]) if rows else EVIDENT_RATE


def search(table: Table, arms: Sequence[str], size: str = "50M") -> list[Job]:
    """The rate search of some arms, the first rates of all of them first."""
    jobs = [Job(arm, size, rate) for rate in FIRST_RATES for arm in arms]
    for arm in arms:
        known = {row["rate"] for row in table.of(arm=arm, size=size, seed=SEEDS[0], recipe="one epoch")}
        if known.issuperset(FIRST_RATES):
            at = RATES.index(best_rate(table, arm, size))
            jobs += [Job(arm, size, RATES[n]) for n in (at - 1, at + 1) if 0 <= n < len(RATES)]
    return jobs


def noise_and_baselines(table: Table) -> list[Job]:
    """Part 1: default and baselines, each at its own best rate; more seeds of the default, one more of a baseline."""
    baselines = [arm.name for arm in BASELINES]
    jobs = search(table, [DEFAULT.name, *baselines])
    for arm, seeds in ((DEFAULT.name, SEEDS), *((name, SEEDS[:2]) for name in baselines)):
        if all(table.find(job) for job in search(table, [arm])):
            jobs += [Job(arm, "50M", best_rate(table, arm), seed) for seed in seeds]
    return jobs


def mechanisms(table: Table) -> list[Job]:
    """Part 2: one change at a time at the default's best rate; the price of spikes at the best rate of each side."""
    rate = best_rate(table, DEFAULT.name)
    first, *others = MECHANISMS
    jobs = [Job(DEFAULT.name, "50M", rate), *search(table, [first.name])]
    jobs += [Job(arm.name, "50M", rate) for arm in others]
    if all(table.find(job) for job in search(table, [first.name])):
        rates = {first.name: best_rate(table, first.name)}
        jobs += [Job(name, "50M", rates.get(name, rate), seed) for seed in SEEDS[1:] for name in REPEATED]
    return jobs


def shapes(table: Table) -> list[Job]:
    """Part 3, at the default's best rate; then the shapes that look best again, and those that help taken together."""
    rate = best_rate(table, DEFAULT.name)
    once = [Job(arm.name, "50M", rate) for arm in SHAPES]
    jobs = [Job(DEFAULT.name, "50M", rate), *once]
    if all(table.find(job) for job in once):
        losses = {arm.name: mean_loss(table.of(arm=arm.name, size="50M", rate=rate, seed=SEEDS[0])) for arm in SHAPES}
        again = sorted(losses, key=losses.__getitem__)[:REPEATED_SHAPES]
        jobs += [Job(name, "50M", rate, seed) for seed in SEEDS[1:] for name in again]
        jobs += [Job(arm.name, "50M", rate, seed) for seed in SEEDS for arm in TOGETHER]
    return jobs


def final_pair(table: Table) -> list[Job]:
    """Part 4: the default and the best baseline at 150M, two seeds each, at two thirds of the small models' best rates.

    The best rate falls about with the square root of a model's size at these sizes.
    """
    found = [rows for arm in BASELINES if (rows := best(table.of(arm=arm.name, size="50M")))]
    rival = min(found, key=mean_loss, default=None)
    names = [DEFAULT.name, rival[0]["arm"] if rival else BASELINES[-1].name]
    rates = {name: round(best_rate(table, name) * 2 / 3, 6) for name in names}
    return [Job(name, "150M", rates[name], seed, "final") for seed in SEEDS[:2] for name in names]


PARTS = {"1": noise_and_baselines, "2": mechanisms, "3": shapes, "4": final_pair}
