# install-needs.sh VARIANT INDEX: what p2ptrain needs, at the pinned versions, into /venv; torch without CUDA unless it
# is asked for.
set -eu
variant=$1 index=$2
pip() { /venv/bin/python -m pip install --no-cache-dir --disable-pip-version-check -c constraints.txt "$@"; }
case "$variant" in
  cpu) index=${index:-https://download.pytorch.org/whl/cpu} ;;
  cuda) ;;
  *) echo "VARIANT is cpu or cuda, and not $variant" >&2; exit 2 ;;
esac
[ "$index" = none ] && index=
# The index of torch without CUDA has not all that torch needs at our pins, so that comes from PyPI with the rest.
alone=
[ "$variant" = cpu ] && [ -n "$index" ] && alone=--no-deps
if ! pip $alone ${index:+--index-url "$index"} torch; then
  echo "torch cannot be fetched${index:+ from $index}: is there a network? (docker build --network host may help;" \
       "--build-arg TORCH_INDEX=… names another place, none takes pip's own)" >&2
  exit 1
fi
/venv/bin/python - > needs.txt <<'LIST'
import configparser
setup = configparser.ConfigParser()
setup.read("setup.cfg")
extras = setup["options.extras_require"]
print(setup["options"]["install_requires"], extras["data"], extras["page"], sep="\n")  # data: runs on the hub's text
LIST
if ! pip -r needs.txt; then
  echo "what p2ptrain needs cannot be fetched from pip's own places: is there a network?" \
       "(docker build --network host may help)" >&2
  exit 1
fi
# What is never imported here: tests, and headers for compilers.
find /venv -type d \( -name tests -o -name test \) -path '*/site-packages/*' -not -path '*/torch/*' -prune -exec rm -rf {} +
rm -rf /venv/lib/python3*/site-packages/torch/include /venv/lib/python3*/site-packages/torch/test
