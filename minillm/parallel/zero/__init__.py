"""ZeRO stages 1 and 2: optimizer state, then gradients, 1/N per rank."""
