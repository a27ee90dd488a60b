"""What carries a group's operations: messages of our own on the CPU, torch's asynchronous calls on NCCL."""
