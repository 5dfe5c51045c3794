"""`python -m mlxpool.parent.jobs.dataset --task JSON --tether-fd N`: see `process`."""

import sys

from mlxpool.parent.jobs.dataset.process import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
