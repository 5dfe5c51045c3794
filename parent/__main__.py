"""`python -m mlxpool.parent` is the `mlxpool` command."""

from mlxpool.parent.cli import main

if __name__ == "__main__":
    main()
