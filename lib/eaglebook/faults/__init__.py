"""A draft that must be accepted fully, and broken copies of it: what each fault does, and who notices."""
