"""Writers: from logical tensors to files that other tools read."""
