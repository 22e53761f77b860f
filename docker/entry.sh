# p2ptrain-entry bootstrap|peer [OPTION]...: how a container begins. Whatever follows goes to p2ptrain.
#
# /data    this container's own: run, identity, checkpoints
# /swarm   shared by a compose project: the bootstrap writes the join link there, peers read it
#
# LINK          a peer's join link; without it the one in /swarm; without that a peer that lives in /data goes on with its
#               run, and a new one waits for /swarm's
# PRESET        of a new run: demo, llama-15m, llama-135m
# TOKENS_PER_PEER   of a new run: where it ends, in place of what the preset says
# PORT          of a bootstrap, unless an option --listen says it; p2ptrain-health dials there
# UP_MBIT, DOWN_MBIT, DELAY_MS, LOSS_PERCENT   of this container's line (p2ptrain-line; needs the capability NET_ADMIN, and
#               to begin as root)
set -eu
what=$1
shift

if [ "$(id -u)" -eq 0 ]; then
  sh /usr/local/bin/p2ptrain-line "${UP_MBIT:-}" "${DOWN_MBIT:-}" "${DELAY_MS:-}" "${LOSS_PERCENT:-}"
  unset UP_MBIT DOWN_MBIT DELAY_MS LOSS_PERCENT  # done
  export HOME=/data  # not root's, which nobody else may even look into
  exec setpriv --reuid=10001 --regid=10001 --clear-groups --bounding-set=-all sh "$0" "$what" "$@"
fi
if [ -n "${UP_MBIT:-}${DOWN_MBIT:-}${DELAY_MS:-}${LOSS_PERCENT:-}" ]; then
  echo "UP_MBIT, DOWN_MBIT, DELAY_MS and LOSS_PERCENT need a container that begins as root: --user root --cap-add NET_ADMIN" >&2
  exit 2
fi

# Where a bootstrap with these options listens, if they say it.
listens() {
  while [ $# -gt 0 ]; do
    case "$1" in
      --listen) echo "${2:-}"; return ;;
      --listen=*) echo "${1#*=}"; return ;;
      --local) echo /ip4/127.0.0.1/tcp/0; return ;;
    esac
    shift
  done
}

case "$what" in
  bootstrap)
    for option; do
      case "$option" in
        --home | --home=*) echo "error: --home has no place here: the bootstrap lives in /data/run; mount that" >&2; exit 2 ;;
      esac
    done
    listen=$(listens "$@")
    if [ -z "$listen" ]; then
      listen=/ip4/0.0.0.0/tcp/${PORT:-31337}
      set -- --listen "$listen" "$@"
    fi
    echo "$listen" > /data/listen
    rm -f /swarm/join-link.txt /data/run/bootstrap/join-link.txt  # of last time: nobody may join by it meanwhile
    if [ ! -e /data/run ]; then  # it is there as a whole or not at all, whenever we are killed
      rm -rf /data/run.new
      python3 -m p2ptrain.cli init /data/run.new --preset "${PRESET:-demo}"
      if [ -n "${TOKENS_PER_PEER:-}" ]; then
        sed -i "s/^tokens_per_peer = .*/tokens_per_peer = $TOKENS_PER_PEER/" /data/run.new/manifest.toml
      fi
      python3 -m p2ptrain.cli sign /data/run.new
      mv /data/run.new /data/run
    fi
    (until [ -f /data/run/bootstrap/join-link.txt ]; do sleep 0.2; done
     cp /data/run/bootstrap/join-link.txt /swarm/.link && mv /swarm/.link /swarm/join-link.txt) &
    exec python3 -m p2ptrain.cli bootstrap /data/run "$@"
    ;;
  peer)
    if [ -z "${LINK:-}" ] && [ ! -f /swarm/join-link.txt ] && [ ! -f /data/peer/manifest.signed ]; then
      echo "[join] waiting for the bootstrap's join link in /swarm; or set LINK" >&2
      until [ -f /swarm/join-link.txt ]; do sleep 0.5; done
    fi
    [ -n "${LINK:-}" ] || [ ! -f /swarm/join-link.txt ] || LINK=$(cat /swarm/join-link.txt)
    exec python3 -m p2ptrain.cli peer ${LINK:+"$LINK"} --home /data/peer --nickname "${NICKNAME:-$(hostname | cut -c -32)}" "$@"
    ;;
esac
