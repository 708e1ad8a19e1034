"""Reading, judging and writing training data."""
