"""The names of what a run writes into its output folder beside the result."""

SETTINGS = "finetune.yaml"
SOURCES = "sources.json"
TOKENS, NEW_TOKENS = "tokens", ".tokens-new"
CHECKPOINTS = "checkpoints"
