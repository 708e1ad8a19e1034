"""Model outputs, JSON Schemas and providers' rules."""
