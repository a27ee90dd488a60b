"""The stops of the tour: `rows()` of lab_NN.py runs each mechanism of lab NN once and yields its receipt rows."""
