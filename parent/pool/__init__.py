"""The pool: which models are resident, who waits for them, and the processes that hold them.

Read design.md in this folder first.
"""
