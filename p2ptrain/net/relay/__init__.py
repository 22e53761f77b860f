"""Reachability: whether others can dial this peer, and the relays and circuits that are used where they cannot."""
