"""What `distft.plan` is made of: speeds of a machine, layouts, advice, tables and plots."""
