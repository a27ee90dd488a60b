"""What should happen: closed forms for bytes, rounds, time and memory. No torch needed."""
