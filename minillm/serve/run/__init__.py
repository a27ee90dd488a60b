"""A step from plan to tokens, its memory, and what makes it faster.

`core.py` plans, executes and finishes a step; `step.py` makes its inputs, the plain arrays of `step_inputs.py`;
`model_runner.py` executes them.
"""
