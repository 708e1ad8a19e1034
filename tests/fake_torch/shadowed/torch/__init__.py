"""A folder of the user's that happens to be called torch."""
