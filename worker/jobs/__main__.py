"""`python -m mlxpool.worker.jobs KIND --task JSON --tether-fd N`: see `mlxpool.worker.jobs.process`."""

import sys

from mlxpool.worker.jobs.process import main

if __name__ == "__main__":
    main(sys.argv[1:])
