"""What accelerators are here, whether their drivers answer, and what they can do."""
