# p2ptrain-line UP DOWN: the rates of this container's line in Mbit/s; empty: none. Needs root and NET_ADMIN.
# A token bucket for what leaves. What comes in too fast is dropped, which slows its sender down.
set -eu
up=${1:-} down=${2:-}
cannot() {
  echo "[line] $1 cannot be set; why is told above. The container needs --cap-add NET_ADMIN, and the host's kernel" \
       "its modules: sudo modprobe -a $2" >&2
  exit 1
}
if [ -n "$up" ]; then
  tc qdisc replace dev eth0 root tbf rate "${up}mbit" burst 64kb latency 300ms \
    || cannot "the rate of what leaves" sch_tbf
fi
if [ -n "$down" ]; then
  nft -f - <<RULES || cannot "the rate of what comes in" "nf_tables nft_limit"
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
