"""Patterns of the names that Kubernetes accepts."""

from __future__ import annotations

import re

LABEL_LENGTH = 63
LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # RFC 1035: it names a Service
LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
