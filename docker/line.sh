# p2ptrain-line UP DOWN [DELAY LOSS [both]]: this container's line; empty: none of it. Needs root and NET_ADMIN.
# UP, DOWN   rates in Mbit/s. A token bucket for what leaves. What comes in too fast is dropped, which slows its sender
#            down.
# DELAY, LOSS   milliseconds and percent of the packets that leave, where the kernel has netem; elsewhere rates alone
# both       as many of those that come in are lost, too, and what the kernel cannot do ends this: for a laboratory
# DEVICE     a variable: the link, else eth0
set -eu
up=${1:-} down=${2:-} delay=${3:-} loss=${4:-} both=${5:-}
link=${DEVICE:-eth0}
number() {  # NAME WORDS VALUE
  case "$3" in
    *[!0-9.]* | *.*.* | .) echo "[line] $1 is $2 as a number, such as 10 or 0.5; '$3' is none" >&2; exit 2 ;;
  esac
}
number UP_MBIT "Mbit/s" "$up"
number DOWN_MBIT "Mbit/s" "$down"
number DELAY_MS "milliseconds" "$delay"
number LOSS_PERCENT "percent" "$loss"
cannot() {
  echo "[line] $1 cannot be set; why is told above. The container needs --cap-add NET_ADMIN, and the host's kernel" \
       "its modules: sudo modprobe -a $2" >&2
  exit 1
}
netem() {  # its own queue would hold 1000 packets, which a fast line that is late has under way
  tc qdisc replace dev "$link" root handle 1: netem limit 100000 delay "${delay:-0}ms" loss "${loss:-0}%"
}
place=root
if [ -n "$delay$loss" ]; then
  if [ -n "$both" ]; then
    netem || cannot "the delay and loss of what leaves" sch_netem
    place="parent 1:1 handle 2:"
  elif told=$(netem 2>&1); then
    place="parent 1:1 handle 2:"
  else
    echo "[line] no packet is late or lost, since tc says: $told (if this kernel has no netem, on the host:" \
         "sudo modprobe sch_netem)" >&2
  fi
fi
if [ -n "$up" ]; then
  tc qdisc replace dev "$link" $place tbf rate "${up}mbit" burst 64kb latency 300ms \
    || cannot "the rate of what leaves" sch_tbf
fi
rules=
if [ -n "$both" ]; then  # of a million packets so many
  lost=$(awk -v percent="${loss:-0}" 'BEGIN { printf "%.0f", percent * 10000 }')
  [ "$lost" -eq 0 ] || rules="iifname \"$link\" numgen random mod 1000000 < $lost drop"
fi
if [ -n "$down" ]; then
  rules="$rules
        iifname \"$link\" limit rate over $(awk -v mbit="$down" 'BEGIN { printf "%.0f", mbit * 125000 }') bytes/second burst 256 kbytes drop"
fi
if [ -n "$rules" ]; then
  nft -f - <<RULES || cannot "the rate or loss of what comes in" "nf_tables nft_limit nft_numgen"
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
