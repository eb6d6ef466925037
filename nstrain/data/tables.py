"""How many bytes the tables of documents take beside the tokens: where documents are short, more than these.

How long a source's documents are is known of the files that it has opened and of its held-out text; before either is
there, nothing is counted.
"""

from __future__ import annotations

import contextlib
from fractions import Fraction

from nstrain.base.errors import Refusal
from nstrain.data.cycles import STREAM_DOCUMENT
from nstrain.data.entries import DOCUMENT
from nstrain.data.line import DataLine
from nstrain.data.manifest import states_before
from nstrain.data.state import SourceState
from nstrain.data.val import load_index


def opened_token_bytes(line: DataLine, name: str, state: SourceState) -> Fraction:
    """Bytes of an entry under open/ for each of its tokens, its table included."""
    return line.token_dtype.itemsize + DOCUMENT.itemsize * _documents_a_token(line, name, state)


def cycle_tables_bytes(line: DataLine, cycle: int) -> int:
    """Bytes of the tables of documents of a cycle."""
    plan, before = line.cycle_plan(cycle), states_before(line, cycle)
    documents = sum(
        targets * _documents_a_token(line, name, before[name])
        for name, targets in zip(plan.sources, plan.source_tokens, strict=True)
    )
    return int(documents * STREAM_DOCUMENT.itemsize)


def _documents_a_token(line: DataLine, name: str, state: SourceState) -> Fraction:
    documents, tokens = state.counts.documents, sum(stratum.opened_tokens for stratum in state.strata)
    if (line.work / "val" / "index.json").exists():
        with contextlib.suppress(Refusal):  # damaged: `verify` and a run say so
            held_out = load_index(line)["sources"][name]
            documents, tokens = documents + held_out["documents"], tokens + held_out["tokens"]
    return Fraction(documents, max(1, tokens))
