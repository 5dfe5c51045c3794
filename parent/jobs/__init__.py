"""Long work that is not a request: rows that say what became of it, and the processes that do it."""
