"""transformers models on lean's attention."""
