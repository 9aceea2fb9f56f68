"""vLLM, always in a process of its own: a server that is owned safely, its counters, the load ladder."""
