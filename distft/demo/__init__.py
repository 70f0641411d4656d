"""The main job on a laptop: one small fine-tune under six strategies, swapped by one argument.

``python -m distft.demo`` builds a chat data set out of the standard library's own documentation,
trains a tokenizer on it, trains a small Qwen3 in one process and under every strategy, compares
what came out and what it cost, and ends with a generated answer. Nothing is downloaded.
"""
