# p2ptrain-health: whether a bootstrap has told its join link and can be dialed where it listens, which p2ptrain-entry
# has noted. (At whatever port is free: nobody knows which, so the link alone counts.)
set -eu
test -f /swarm/join-link.txt
exec python3 -c '
import socket
_, _, host, _, port, *_ = open("/data/listen").read().strip().split("/")
port == "0" or socket.create_connection((host, int(port)), 3)
'
