"""From files to sequences: readers, splits, tokenizers, batches. Nothing here imports torch."""
