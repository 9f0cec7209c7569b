"""The learning; knows no orchestrator."""
