"""`python -m mx_jax`."""

import sys

from mx_jax.cli import main

sys.exit(main())
