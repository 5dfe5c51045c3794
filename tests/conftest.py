"""Test helpers are plain modules beside the tests; this makes them importable."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE / "unit", HERE / "tools", HERE / "system"):
    sys.path.insert(0, str(folder))

# Fixtures for every test: `tiny` (tiny random models) and `starter_folder` (the starter model).
pytest_plugins = ["tiny_fixture", "starter_fixture"]
