"""Jobs that compute with a model, each in a process of its own: `python -m mlxpool.worker.jobs KIND`."""
