"""Names of devices that options and settings accept. Without torch, whose import a command's help must not wait for."""

from __future__ import annotations

import re

DEVICE_NAME = re.compile(r"auto|cpu|mps|(?:cuda|xpu)(?::\d{1,3})?")

DEVICE_WORDS = "auto, cpu, mps, cuda, xpu, cuda:<number> or xpu:<number>"
"""Names of devices for people. In torch, cards of AMD are called cuda, cards of Intel xpu, and Apple's chips mps."""
