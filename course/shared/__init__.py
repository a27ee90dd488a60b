"""What several labs use: learners' code on real ranks, diagnosis helpers."""
