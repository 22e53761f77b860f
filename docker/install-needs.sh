# install-needs.sh VARIANT INDEX: installs the dependencies of p2ptrain at their pinned versions into /venv.
# VARIANT   cpu: torch without CUDA; cuda: torch with it
# INDEX     package index for torch; empty: the variant's default; none: pip's own
set -eu
variant=$1 index=$2
pip() { /venv/bin/python -m pip install --no-cache-dir --disable-pip-version-check -c constraints.txt "$@"; }
case "$variant" in
  cpu) index=${index:-https://download.pytorch.org/whl/cpu} ;;
  cuda) ;;
  *) echo "VARIANT must be cpu or cuda, got $variant." >&2; exit 2 ;;
esac
[ "$index" = none ] && index=
# The index of torch without CUDA lacks some dependencies at our pins, so these come from PyPI with the rest.
alone=
[ "$variant" = cpu ] && [ -n "$index" ] && alone=--no-deps
if ! pip $alone ${index:+--index-url "$index"} torch; then
  echo "torch cannot be fetched${index:+ from $index}: is there a network? Try docker build --network host, or name" \
       "another package index with --build-arg TORCH_INDEX=... (none: pip's own)." >&2
  exit 1
fi
/venv/bin/python - > needs.txt <<'LIST'
import configparser
setup = configparser.ConfigParser()
setup.read("setup.cfg")
extras = setup["options.extras_require"]
print(setup["options"]["install_requires"], extras["data"], extras["page"], sep="\n")  # data: corpora from the Hugging Face hub
LIST
if ! pip -r needs.txt; then
  echo "p2ptrain's dependencies cannot be fetched from pip's package index: is there a network?" \
       "Try docker build --network host." >&2
  exit 1
fi
# Tests are never used here.
find /venv -type d \( -name tests -o -name test \) -path '*/site-packages/*' -not -path '*/torch/*' -prune -exec rm -rf {} +
rm -rf /venv/lib/python3*/site-packages/torch/test
