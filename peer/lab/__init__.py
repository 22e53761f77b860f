"""The laboratory: a scenario acted out by real peers, on this machine."""
