# Runs the compose file's router: masquerades connections from its inner network and drops new ones from outside.
# ROUTER   the router's address on the inner network. The script resolves no names: the bootstrap may be down.
set -eu
: "${ROUTER:?set it to the address of the router on its inner network}"
for _ in $(seq 20); do  # the engine may connect the network a moment later
  inside=$(ip -o -4 address show to "$ROUTER/32" | awk '{ sub(/@.*/, "", $2); print $2; exit }')
  [ -n "$inside" ] && break
  sleep 0.5
done
if [ -z "$inside" ]; then
  echo "[router] No network interface has the address $ROUTER. Attach the container to that network." >&2
  exit 1
fi
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
  echo "[router] Cannot set the nftables rules, for the reason above. Type on the host:" \
       "sudo modprobe -a nf_tables nft_masq" >&2
  exit 1
fi
echo "[router] forwarding connections from $inside; dropping new connections from outside"
exec sleep infinity
