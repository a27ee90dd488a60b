"""What ranks are doing, whether they mean the same, and who waits for whom."""
