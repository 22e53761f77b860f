"""Recipes that average over all peers at once, simulated in lockstep."""
