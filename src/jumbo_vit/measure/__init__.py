"""Measuring models: size and cost, where they look, how long their tokens are, how fast they run."""
