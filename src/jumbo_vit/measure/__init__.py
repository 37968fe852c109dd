"""Measuring models: size and cost."""
