"""minillm side by side with its peers, on the same work in the same run."""
