"""What the labs draw: `lab_NN.py` has the figures of lab NN; its FIGURES are the committed ones."""
