# p2ptrain-line UP DOWN [DELAY LOSS [both]]: emulates a slow link. An empty argument sets nothing. Needs root and
# NET_ADMIN.
# UP, DOWN      Mbit/s; a token bucket shapes outgoing packets, incoming packets above the rate are dropped
# DELAY, LOSS   milliseconds and percent of outgoing packets; skipped with a warning if the kernel lacks netem
# both          also lose LOSS percent of incoming packets, and fail if the kernel lacks a feature (for the laboratory)
# DEVICE        environment variable: network interface, default eth0
set -eu
up=${1:-} down=${2:-} delay=${3:-} loss=${4:-} both=${5:-}
link=${DEVICE:-eth0}
number() {  # NAME WORDS VALUE
  case "$3" in
    *[!0-9.]* | *.*.* | .) echo "[line] $1 must be a number ($2), such as 10 or 0.5, got '$3'." >&2; exit 2 ;;
  esac
}
number UP_MBIT "Mbit/s" "$up"
number DOWN_MBIT "Mbit/s" "$down"
number DELAY_MS "milliseconds" "$delay"
number LOSS_PERCENT "percent" "$loss"
cannot() {
  echo "[line] Cannot set $1, for the reason above. Run the container with --cap-add NET_ADMIN, and load the kernel" \
       "modules on the host: sudo modprobe -a $2" >&2
  exit 1
}
netem() {  # the default limit of 1000 packets is less than a fast link with delay has in flight
  tc qdisc replace dev "$link" root handle 1: netem limit 100000 delay "${delay:-0}ms" loss "${loss:-0}%"
}
place=root
if [ -n "$delay$loss" ]; then
  if [ -n "$both" ]; then
    netem || cannot "the delay and loss of outgoing packets" sch_netem
    place="parent 1:1 handle 2:"
  elif told=$(netem 2>&1); then
    place="parent 1:1 handle 2:"
  else
    echo "[line] Running without delay and loss, because tc says: $told If the kernel has no netem, type on the host:" \
         "sudo modprobe sch_netem" >&2
  fi
fi
if [ -n "$up" ]; then
  tc qdisc replace dev "$link" $place tbf rate "${up}mbit" burst 64kb latency 300ms \
    || cannot "the rate of outgoing packets" sch_tbf
fi
rules=
if [ -n "$both" ]; then  # per million packets
  lost=$(awk -v percent="${loss:-0}" 'BEGIN { printf "%.0f", percent * 10000 }')
  [ "$lost" -eq 0 ] || rules="iifname \"$link\" numgen random mod 1000000 < $lost drop"
fi
if [ -n "$down" ]; then
  rules="$rules
        iifname \"$link\" limit rate over $(awk -v mbit="$down" 'BEGIN { printf "%.0f", mbit * 125000 }') bytes/second burst 256 kbytes drop"
fi
if [ -n "$rules" ]; then
  nft -f - <<RULES || cannot "the rate or loss of incoming packets" "nf_tables nft_limit nft_numgen"
table inet line
delete table inet line
table inet line {
    chain down {
        type filter hook input priority 0; policy accept;
        $rules
    }
}
RULES
fi
