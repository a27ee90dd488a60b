"""The mechanisms that spread a model over ranks, one folder per axis."""
