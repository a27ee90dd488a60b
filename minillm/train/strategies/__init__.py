"""How one training step is spread over ranks."""
