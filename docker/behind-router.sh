# Runs a peer of the compose file whose only route leads through the router at the address ROUTER, which may be down.
# Starts as root to set the route; p2ptrain-entry then changes to the unprivileged user.
set -eu
if ! ip route replace default via "${ROUTER:?set it to the address of the router on this network}"; then
  echo "[router] Cannot set the default route, for the reason above. Run the container with --cap-add NET_ADMIN, on a" \
       "network that contains $ROUTER." >&2
  exit 1
fi
exec sh /usr/local/bin/p2ptrain-entry peer "$@"
