"""`offmate finetune`: a causal language model and a file of text in, a folder that transformers or peft loads out."""
