"""What runs on an actor host: engines, the rollout loop, verifiers and the weight receiver."""
