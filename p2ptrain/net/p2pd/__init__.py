"""The libp2p daemon p2pd: its process, its control protocol, its streams, and which addresses it may dial."""
