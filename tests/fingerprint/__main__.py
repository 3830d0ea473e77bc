"""Print in which programs results, kernels or bytes exchanged are not as recorded.

    python -m tests.fingerprint [--write] [PATTERN ...]

Patterns are parts of programs' names; without one all are tried. `--write` records what there is
now. Exit status 1: something differs, and was not recorded.
"""

import argparse
import json
import sys

from tests import conftest as conftest  # sets the environment before JAX starts


def main() -> int:
    from tests.fingerprint.measuring import EXPECTED, differences, measure, recorded
    from tests.fingerprint.programs import PROGRAMS

    parser = argparse.ArgumentParser(prog="python -m tests.fingerprint", description=__doc__)
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="part of a program's name")
    parser.add_argument("--write", action="store_true", help="record what there is now")
    arguments = parser.parse_args()
    chosen = [
        n for n in PROGRAMS if not arguments.patterns or any(p in n for p in arguments.patterns)
    ]
    known = recorded() if EXPECTED.exists() else {}
    changed = 0
    for name in chosen:
        record = measure(name)
        lines = differences(known[name], record) if name in known else ["new"]
        changed += bool(lines)
        for line in lines:
            print(f"{name}: {line}", flush=True)
        known[name] = record
    print(f"{changed} of {len(chosen)} programs differ")
    if arguments.write:
        entries = ",\n".join(
            f"  {json.dumps(name)}: {json.dumps(known[name])}" for name in PROGRAMS if name in known
        )
        EXPECTED.write_text(f"{{\n{entries}\n}}\n")
    return int(bool(changed) and not arguments.write)


if __name__ == "__main__":
    sys.exit(main())
