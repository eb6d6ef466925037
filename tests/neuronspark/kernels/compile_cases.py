"""A child process that compiles every case of one kernels' module for one card, and prints what each takes as JSON.

A compiler's abort ends the process, so the name of the case in work is printed first.
"""

from __future__ import annotations

import importlib
import json
import sys

from neuronspark.kernels.launch import allowed_spill, compile_case


def main() -> None:
    """`python compile_cases.py MODULE CARD`."""
    module, card = sys.argv[1:]
    for case in importlib.import_module(module).compile_cases():
        print(json.dumps({"case": case.name}), flush=True)
        found = compile_case(case, card)
        allowed = {"allowed_spill": allowed_spill(case.name, card)}
        print(json.dumps({"case": case.name, **vars(found), **allowed}), flush=True)


if __name__ == "__main__":
    main()
