# p2ptrain-entry bootstrap|peer [OPTION]...: the entry point of both images. OPTIONs are passed on to p2ptrain.
#
# /data    this container's own volume: run, identity, checkpoints
# /swarm   shared by a compose project: the bootstrap writes the join link there, peers read it
#
# LINK          a peer's join link. Without it a peer uses the link in /swarm; without that, a peer with a home in /data
#               resumes its run, and a new peer waits for the link in /swarm
# PRESET        preset of a new run: demo, llama-15m, llama-135m
# TOKENS   length of a new run, in place of the preset's
# PORT          port of a bootstrap without an option --listen; p2ptrain-health connects to it
# UP_MBIT, DOWN_MBIT, DELAY_MS, LOSS_PERCENT   emulated link of this container (p2ptrain-line; the container must start
#               as root with the capability NET_ADMIN)
set -eu
what=$1
shift

if [ "$(id -u)" -eq 0 ]; then
  sh /usr/local/bin/p2ptrain-line "${UP_MBIT:-}" "${DOWN_MBIT:-}" "${DELAY_MS:-}" "${LOSS_PERCENT:-}"
  unset UP_MBIT DOWN_MBIT DELAY_MS LOSS_PERCENT  # applied; not for the peer
  export HOME=/data  # root's home is unreadable for the unprivileged user
  exec setpriv --reuid=10001 --regid=10001 --clear-groups --bounding-set=-all sh "$0" "$what" "$@"
fi
if [ -n "${UP_MBIT:-}${DOWN_MBIT:-}${DELAY_MS:-}${LOSS_PERCENT:-}" ]; then
  echo "UP_MBIT, DOWN_MBIT, DELAY_MS and LOSS_PERCENT need a container that starts as root." \
       "Run it with --user root --cap-add NET_ADMIN." >&2
  exit 2
fi

# Prints the address of the options --listen or --local, if present.
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
        --home | --home=*)
          echo "error: --home is not available in a container. The bootstrap's run is in /data/run: mount that." >&2
          exit 2
          ;;
      esac
    done
    listen=$(listens "$@")
    if [ -z "$listen" ]; then
      listen=/ip4/0.0.0.0/tcp/${PORT:-31337}
      set -- --listen "$listen" "$@"
    fi
    echo "$listen" > /data/listen
    rm -f /swarm/join-link.txt /data/run/bootstrap/join-link.txt  # stale: peers must not join by it
    if [ ! -e /data/run ]; then  # created atomically, in case we are killed
      rm -rf /data/run.new
      python3 -m p2ptrain.cli init /data/run.new --preset "${PRESET:-demo}"
      if [ -n "${TOKENS:-}" ]; then
        sed -i "s/^tokens = .*/tokens = $TOKENS/" /data/run.new/manifest.toml
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
      echo "[join] waiting for the bootstrap's join link in /swarm; set LINK to join another swarm" >&2
      until [ -f /swarm/join-link.txt ]; do sleep 0.5; done
    fi
    [ -n "${LINK:-}" ] || [ ! -f /swarm/join-link.txt ] || LINK=$(cat /swarm/join-link.txt)
    exec python3 -m p2ptrain.cli peer ${LINK:+"$LINK"} --home /data/peer --nickname "${NICKNAME:-$(hostname | cut -c -32)}" "$@"
    ;;
esac
