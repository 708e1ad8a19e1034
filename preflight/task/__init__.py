"""Asking a model questions and judging its answers."""
