"""What happened: operations, bytes, memory, time, and what this machine can do."""
