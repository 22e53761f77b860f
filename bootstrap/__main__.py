"""Entry point of ``python -m bootstrap``."""

from bootstrap.cli import bootstrap
from p2ptrain.cli import run_command

run_command(bootstrap, name="python -m bootstrap")
