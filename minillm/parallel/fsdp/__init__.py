"""Fully sharded data parallelism, ZeRO stage 3: parameters 1/N per rank."""
