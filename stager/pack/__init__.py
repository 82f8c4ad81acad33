"""Pack small files into WebDataset shards."""
