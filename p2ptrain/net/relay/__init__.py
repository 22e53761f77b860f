"""Reachability: whether others can dial this peer, and relays where they cannot."""
