# The router of the compose file: its own network may go out, masqueraded, and nothing new comes in.
set -eu
until bootstrap=$(getent hosts bootstrap | cut -d' ' -f1) && [ -n "$bootstrap" ]; do sleep 0.5; done
outside=$(ip -o route get "$bootstrap" | sed -n 's/.* dev \([^ ]*\).*/\1/p')
[ -n "$outside" ] || { echo "[router] no way to the bootstrap at $bootstrap" >&2; exit 1; }
if ! nft -f - <<RULES
table ip router {
    chain out { type nat hook postrouting priority 100; policy accept; oifname "$outside" masquerade; }
    chain through {
        type filter hook forward priority 0; policy drop;
        ct state established,related accept
        iifname != "$outside" accept
    }
}
RULES
then
  echo "[router] no rules can be set; why is told above. On the host: sudo modprobe -a nf_tables nft_masq" >&2
  exit 1
fi
echo "[router] out through $outside; nothing new comes in"
exec sleep infinity
