"""The forward pass: its inputs, its memory, and what makes it faster."""
