"""Datasets written by a model of this server: templates, the records they are filled with, and the process
that asks. The process is a client like any other: it holds no lease, its requests do."""
