"""Names of devices that options and settings accept. Without torch, whose import a command's help must not wait for."""

from __future__ import annotations

import re

DEVICE_NAME = re.compile(r"auto|cpu|mps|(?:cuda|xpu)(?::\d{1,3})?")

DEVICES_NAME = re.compile(rf"all|(?:{DEVICE_NAME.pattern})(?:,(?:{DEVICE_NAME.pattern})){{0,63}}")
"""One device, several with commas between them, or all cards."""

DEVICE_WORDS = "auto, cpu, mps, cuda, xpu, cuda:<number> or xpu:<number>"
"""Names of devices for people. In torch, cards of AMD are called cuda, cards of Intel xpu, and Apple's chips mps."""

DEVICES_WORDS = f"{DEVICE_WORDS}; several with commas between them; all"
"""Names of one or several devices for people; ``all`` means all cards of one kind."""
