# p2ptrain-line UP DOWN: the rates of this container's line in Mbit/s; empty: none. Needs root and NET_ADMIN.
# A token bucket for what leaves. What comes in too fast is dropped, which slows its sender down.
set -eu
up=${1:-} down=${2:-}
if [ -n "$up" ]; then
  tc qdisc replace dev eth0 root tbf rate "${up}mbit" burst 64kb latency 300ms
fi
if [ -n "$down" ]; then
  nft -f - <<RULES
table inet line
delete table inet line
table inet line {
    chain down {
        type filter hook input priority 0; policy accept;
        iifname "eth0" limit rate over $(awk "BEGIN { printf \"%d\", $down * 125 }") kbytes/second burst 256 kbytes drop
    }
}
RULES
fi
