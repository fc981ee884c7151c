"""How numbers, counts and lists are written, in text and JSON, the same on every page; no file here knows a result."""
