"""Structured output: which tokens may come next, so that the answer has the form that was asked for.

`spec` and `tools` say, purely, what grammar a request needs and whether it can be enforced; `service` has it
compiled in a helper process that can be killed, and hands out the constraints that rows carry.
"""
