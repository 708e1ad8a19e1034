"""What a model directory holds and what can be done with it."""
