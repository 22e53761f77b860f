# A peer of the compose file whose only way out is the router, at the address ROUTER, whether it is up just now or not.
# As root, for the route; then as everybody else.
set -eu
if ! ip route replace default via "${ROUTER:?the address of the router on our network}"; then
  echo "[router] the way out cannot be set; why is told above. The container needs --cap-add NET_ADMIN, and a network" \
       "on which $ROUTER is" >&2
  exit 1
fi
exec sh /usr/local/bin/p2ptrain-entry peer "$@"
