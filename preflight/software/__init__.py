"""Installing a stack into a sandbox, loading it there, and what a failure means."""
