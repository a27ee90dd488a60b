"""What only the notebooks use: exercises, hints, receipts, plots and the notebook builder."""
