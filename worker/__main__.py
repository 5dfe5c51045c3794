"""`python -m mlxpool.worker`: see `mlxpool.worker.main`."""

import sys

from mlxpool.worker.main import main

sys.exit(main())
