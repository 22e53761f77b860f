# A peer of the compose file whose only way out is the router, at the address ROUTER, whether it is up just now or not.
# As root, for the route; then as everybody else.
set -eu
ip route replace default via "${ROUTER:?the address of the router on our network}"
exec sh /usr/local/bin/p2ptrain-entry peer "$@"
