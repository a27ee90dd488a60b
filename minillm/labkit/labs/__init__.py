"""The exercises of each lab: `lab_NN.py` registers the verifiers, hints and references of lab NN."""
