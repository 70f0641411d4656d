"""How a model is spread over ranks: one class for each way, all with the same methods."""
