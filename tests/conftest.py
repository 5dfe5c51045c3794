"""Fixtures for every test: `tiny` (tiny random models) and `starter_folder` (the starter model)."""

pytest_plugins = ["tests.tools.tiny_fixture", "tests.tools.starter_fixture"]
