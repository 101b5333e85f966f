"""The discrete-event model of vLLM V1: ranks that step, KV blocks, and the front end that routes to them."""
