"""The process of one case on a simulated GPU, whose kernel has a fault by the rows of the case.

python -m tests.measure.planted_gpu CASE --tune SECONDS
"""

import json
import os
import sys
import time

from mx_jax.backends.calls import MatmulCall
from mx_jax.backends.target import Backend
from mx_jax.measure import simulation, worker
from tests.backends.altered import altered

RIGHT, WRONG, HANGS, CRASHES = 1, 8, 16, 32


def planted(rows: int) -> Backend:
    """The interpreted kernel, with the fault that belongs to cases of so many rows."""
    own = simulation.backend()

    def multiply(lhs, rhs, call):
        if rows == HANGS:
            time.sleep(3600)
        if rows == CRASHES:
            print("an illegal address", file=sys.stderr, flush=True)
            os.abort()
        out = own.offers[MatmulCall].run(lhs, rhs, call)
        return out.at[-1, -1].add(1) if rows == WRONG else out

    return altered(own, MatmulCall, multiply)


if __name__ == "__main__":
    case, seconds = sys.argv[1], float(sys.argv[3])
    backend = planted(json.loads(case)["shape"][0])
    simulation.backend = lambda: backend
    sys.exit(worker.answer(case, True, tuning=seconds))
