# p2ptrain-health: succeeds if the bootstrap has written its join link and accepts connections at the address that
# p2ptrain-entry wrote to /data/listen. With port 0 (any free port) the join link alone counts.
set -eu
test -f /swarm/join-link.txt
exec python3 -c '
import socket
_, _, host, _, port, *_ = open("/data/listen").read().strip().split("/")
port == "0" or socket.create_connection((host, int(port)), 3)
'
