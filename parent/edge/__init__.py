"""The HTTP surface: who may ask, what is asked, and the relay to the worker that answers."""
