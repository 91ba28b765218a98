"""lm-evaluation-harness on lean."""
