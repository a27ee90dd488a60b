"""Spoilers: known answers. `lab_NN.py` holds wrong ones, which the checks must reject, and other right ones."""
