"""Where draft tokens come from; `minillm.serve.speculate.registry` has them by name."""
