"""`offmate finetune`: trains a causal language model on a text file into a folder that transformers or peft loads."""
