# The router of the compose file: its own network may go out, masqueraded, and nothing new comes in.
# ROUTER   its address on that network. Nobody's name is asked for: the bootstrap may be away when we come back.
set -eu
: "${ROUTER:?the address of the router on its own network}"
for _ in $(seq 20); do  # an engine may connect a network a moment later
  inside=$(ip -o -4 address show to "$ROUTER/32" | awk '{ sub(/@.*/, "", $2); print $2; exit }')
  [ -n "$inside" ] && break
  sleep 0.5
done
[ -n "$inside" ] || { echo "[router] no link of ours has the address $ROUTER" >&2; exit 1; }
if ! nft -f - <<RULES
table ip router
delete table ip router
table ip router {
    chain out { type nat hook postrouting priority 100; policy accept; oifname != { "lo", "$inside" } masquerade; }
    chain through {
        type filter hook forward priority 0; policy drop;
        ct state established,related accept
        iifname "$inside" accept
    }
}
RULES
then
  echo "[router] no rules can be set; why is told above. On the host: sudo modprobe -a nf_tables nft_masq" >&2
  exit 1
fi
echo "[router] all of $inside may go out; nothing new comes in"
exec sleep infinity
