"""Find the tool calls in an answer and stream them: one small reader per way of writing calls.

`families.py` is the table; `machine.py` drives the readers, which are generators over a `Feed`.
"""
