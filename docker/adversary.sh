# Runs the compose file's adversarial peer. LIE names its behaviour (docs/LABORATORY.md).
set -eu
until [ -f /swarm/join-link.txt ]; do sleep 0.5; done
exec python3 -m lab.hostile "${LIE:-flipped}" "$(cat /swarm/join-link.txt)" --home /data/peer --nickname "$(hostname)"
