"""What every strategy shares while it trains: the loss mean, the norm, the step, the data order."""
