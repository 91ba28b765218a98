"""Speed: timing, whole models, single layers, other engines."""
