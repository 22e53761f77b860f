"""Simulated peers that train real small language models, all in one pool of stacked weights."""
