"""Adapters in a worker: read and checked, mounted by id, switched on for the forward passes of their rows."""
