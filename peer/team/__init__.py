"""A peer on several devices: its rank processes, the generations in which they work, and what they agree on."""
