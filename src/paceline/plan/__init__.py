"""Predict what a plan sends and holds, without training and without torch."""
