# A peer of the compose file that lies: LIE is one of the laboratory's (docs/LABORATORY.md).
set -eu
until [ -f /swarm/join-link.txt ]; do sleep 0.5; done
exec python3 -m lab.hostile "${LIE:-flipped}" "$(cat /swarm/join-link.txt)" --home /data/peer --nickname "$(hostname)"
