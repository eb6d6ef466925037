"""A child process that compiles every case of one kernels' module for some cards, and prints what each takes as JSON.

A compiler's abort ends the process, so the name of the case in work is printed first.
"""

from __future__ import annotations

import importlib
import json
import sys

from neuronspark.kernels.launch import allowed_spill, compile_case


def main() -> None:
    """`python compile_cases.py MODULE CARD ...`."""
    module, *cards = sys.argv[1:]
    for case in importlib.import_module(module).compile_cases():
        for card in cards:
            named = {"case": case.name, "card": card}
            print(json.dumps(named), flush=True)
            found = compile_case(case, card)
            print(json.dumps({**named, **vars(found), "allowed_spill": allowed_spill(case.name, card)}), flush=True)


if __name__ == "__main__":
    main()
