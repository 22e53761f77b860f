# p2ptrain-line UP DOWN [DELAY LOSS]: this container's line; empty: none of it. Needs root and NET_ADMIN.
# UP, DOWN   rates in Mbit/s. A token bucket for what leaves. What comes in too fast is dropped, which slows its sender
#            down.
# DELAY, LOSS   milliseconds and percent of the packets that leave, where the kernel has netem; elsewhere rates alone
set -eu
up=${1:-} down=${2:-} delay=${3:-} loss=${4:-}
cannot() {
  echo "[line] $1 cannot be set; why is told above. The container needs --cap-add NET_ADMIN, and the host's kernel" \
       "its modules: sudo modprobe -a $2" >&2
  exit 1
}
place=root
if [ -n "$delay$loss" ]; then
  if tc qdisc replace dev eth0 root handle 1: netem delay "${delay:-0}ms" loss "${loss:-0}%" 2>/dev/null; then
    place="parent 1:1 handle 2:"
  else
    echo "[line] this kernel has no netem (on the host: sudo modprobe sch_netem), so no packet is late or lost" >&2
  fi
fi
if [ -n "$up" ]; then
  tc qdisc replace dev eth0 $place tbf rate "${up}mbit" burst 64kb latency 300ms \
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
