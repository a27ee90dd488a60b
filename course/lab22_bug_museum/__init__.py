"""Lab 22: real bugs, planted one at a time in minillm."""
