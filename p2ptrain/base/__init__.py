"""Small modules that every other part may import."""
